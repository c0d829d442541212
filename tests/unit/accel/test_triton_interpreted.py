"""The Triton kernels on a machine without a GPU: `triton_kernels.py` in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdgrab.balancing import tables

CASES = Path(__file__).with_name("triton_kernels.py")


@pytest.mark.skipif(
    not tables._has_triton(), reason="there is no Triton 3.3 or newer; the extra dev has it for Linux on x86-64"
)
def test_kernels_in_the_interpreter() -> None:
    """In a process of their own: whether kernels are interpreted is settled when Triton is imported."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr

"""Ray Train: two workers, one of which is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integrations._programs import EXAMPLES

pytest.importorskip("ray")


def epochs(folder: Path, *more: str) -> dict[str, str]:
    """What the example said of its epochs."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "with_ray.py"), "--folder", str(folder), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"(epoch \d): (last loss [\d.]+, imbalance 0\.\d+)", done.stdout + done.stderr))


@pytest.mark.slow
def test_a_run_that_lost_a_worker_ends_as_if_it_had_not(tmp_path: Path) -> None:
    """The last checkpoint is one from the middle of an epoch."""
    straight, interrupted = epochs(tmp_path / "straight"), epochs(tmp_path / "interrupted", "--lose-a-worker")
    assert len(straight) == 4
    assert interrupted == straight

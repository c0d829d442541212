"""The examples run under torchrun as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_examples_train_on_two_ranks(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # how far it came, too
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+), imbalance 0\.\d+", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2

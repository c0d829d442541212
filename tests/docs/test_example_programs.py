"""The examples run as they stand under torchrun. Those of tools have tests in `tests/integrations`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(*command: str) -> list[str]:
    """What a program says of its epochs."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # how far it came, too
    return re.findall(r"(epoch \d: loss [\d.]+, imbalance 0\.\d+)", done.stdout)


def loss_of(line: str) -> float:
    return float(line.split()[3].rstrip(","))


def torchrun(name: str, *options: str) -> list[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return losses(*ranks, str(EXAMPLES / f"{name}.py"), *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_examples_train_on_two_ranks(name: str) -> None:
    found = torchrun(name)
    assert len(found) == 5
    assert loss_of(found[-1]) < loss_of(found[0]) / 2

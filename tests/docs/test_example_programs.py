"""The examples run as they stand: under torchrun, and in the loops of other libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


# Programs one after the other, which import the library they plug into once.
IN_TURN = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "checkpoint"),
    [
        ("with_lightning", "pytorch_lightning", "epoch=0.ckpt"),
    ],
)
def test_examples_train_in_the_loops_of_others_and_resume_exactly(
    name: str, package: str, checkpoint: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    program, options = str(EXAMPLES / f"{name}.py"), ["--epochs", "3", "--folder"]
    straight = [program, *options, str(tmp_path / "straight")]
    resumed = [program, *options, str(tmp_path / "resumed"), "--resume", str(tmp_path / "straight" / checkpoint)]
    found = losses("-c", IN_TURN, json.dumps([straight, resumed]))
    assert len(found) == 5
    assert loss_of(found[2]) < loss_of(found[0]) / 2
    assert found[3:] == found[1:3]
    folder = str(tmp_path / "ranks")
    on_ranks = losses(program, "--devices", "2", *options, folder)  # it starts its ranks itself
    assert len(on_ranks) == 3
    assert loss_of(on_ranks[-1]) < loss_of(on_ranks[0]) / 2

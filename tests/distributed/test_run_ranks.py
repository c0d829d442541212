"""`cdgrab run` on real ranks trains as it does with simulated workers, and goes on where it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from _data import MAKE
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.records import EpochRecord, Run, load_all
from cdgrab_experiments.runner import Interrupted, Place, run
from distributed._ranks import run_ranks

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]


def test_torchrun(tmp_path: Path) -> None:
    """The command of docs/experiments.md."""
    options = ["run", "digits", "--workers", "2", "--batch", "64", "--epochs", "2", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *TORCHRUN, "cdgrab", *options, "--device", "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = load_all(tmp_path)
    assert found.complete
    assert found.epochs[-1].bytes > 0
    assert done.stdout.count("Records in") == 1  # one rank speaks


def train(
    task: str, order: str, folder: Path, data: Path, stop_after: int | None, partition: str = "iid"
) -> Run | None:
    workers = 4 if task == "wikitext2" else 2
    batch = 64 if task == "digits" else 4
    config = resolve(task, Choices(order=order, workers=workers, batch_size=batch, epochs=4, partition=partition))

    def stop(record: EpochRecord) -> None:
        if record.epoch == stop_after:
            raise KeyboardInterrupt

    try:
        return run(config, Place(folder, data), on_epoch=stop)
    except Interrupted:
        return None


@pytest.mark.parametrize(("task", "order"), [("digits", "cd-grab"), ("mnist", "cd-grab"), ("mnist", "pair")])
def test_ranks_train_as_simulated_workers(task: str, order: str, tmp_path: Path) -> None:
    MAKE[task](tmp_path / "data")
    here = train(task, order, tmp_path / "here", tmp_path / "data", None)
    assert here is not None
    assert run_ranks(2, train, task, order, tmp_path / "there", tmp_path / "data", 2) == [None, None]  # interrupted
    for there in run_ranks(2, train, task, order, tmp_path / "there", tmp_path / "data", None):
        assert [record.epoch for record in there.epochs] == list(range(5))
        assert [record.loss for record in there.epochs] == pytest.approx([r.loss for r in here.epochs], rel=1e-4)
        if order == "cd-grab":
            assert there.epochs[-1].imbalance == pytest.approx(here.epochs[-1].imbalance, rel=1e-3)
    assert load_all(tmp_path / "there")[0].complete


def test_ranks_own_what_the_split_gives_them(tmp_path: Path) -> None:
    here = train("digits", "cd-grab", tmp_path / "here", tmp_path, None, "sorted")
    assert here is not None
    for there in run_ranks(2, train, "digits", "cd-grab", tmp_path / "there", tmp_path, None, "sorted"):
        assert [record.loss for record in there.epochs] == pytest.approx([r.loss for r in here.epochs], rel=1e-4)


@pytest.mark.parametrize("order", ["rr", "cd-grab"])
def test_each_rank_carries_the_state_of_its_columns(order: str, tmp_path: Path) -> None:
    """The LSTM as published: a model's state is its rank's own, and what is clipped is the averaged gradient."""
    MAKE["wikitext2"](tmp_path / "data")
    here = train("wikitext2", order, tmp_path / "here", tmp_path / "data", None)
    assert here is not None
    for there in run_ranks(4, train, "wikitext2", order, tmp_path / "there", tmp_path / "data", None):
        assert [record.loss for record in there.epochs] == pytest.approx([r.loss for r in here.epochs], rel=1e-4)

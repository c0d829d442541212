"""Runs on disk: complete, interrupted, resumed, damaged, diverged."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdgrab.paper import records, runner
from cdgrab.paper.choices import Choices, command, resolve
from cdgrab.paper.config import RunConfig
from cdgrab.paper.records import EpochRecord, load, load_all
from cdgrab.paper.runner import Interrupted, Place, estimate, find_run, run


def chosen(**changes: Any) -> RunConfig:
    return resolve("digits", Choices(**{"epochs": 6, "seed": 1, **changes}))


def place(folder: Path) -> Place:
    return Place(folder, folder / "no-data-needed")


def after(epoch: int) -> Callable[[EpochRecord], None]:
    def stop(record: EpochRecord) -> None:
        if record.epoch == epoch:
            raise KeyboardInterrupt

    return stop


def test_a_complete_run_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(chosen(), place(tmp_path), command="as typed")
    folder = place(tmp_path).folder(chosen())
    assert sorted(path.name for path in folder.iterdir()) == ["epochs.jsonl", "run.json"]
    assert first == load(folder)
    assert first.complete
    assert [record.epoch for record in first.epochs] == list(range(7))
    assert first.info.command == "as typed"
    monkeypatch.setattr(runner, "Trainer", None)  # nothing is trained any more
    told: list[int] = []
    assert run(chosen(), place(tmp_path), on_epoch=lambda record: told.append(record.epoch)) == first
    assert told == list(range(7))


@pytest.mark.parametrize("epoch", [0, 3, 6])
def test_an_interrupted_run_goes_on(tmp_path: Path, epoch: int) -> None:
    straight = run(chosen(), place(tmp_path / "straight"))
    with pytest.raises(Interrupted) as stopped:
        run(chosen(), place(tmp_path / "broken"), on_epoch=after(epoch))
    assert stopped.value.epochs == epoch
    found = find_run(chosen(), place(tmp_path / "broken"))
    assert found is not None
    assert len(found.epochs) == epoch + 1
    resumed = run(chosen(), place(tmp_path / "broken"))
    assert [record.loss for record in resumed.epochs] == [record.loss for record in straight.epochs]
    assert not list(tmp_path.rglob("state.pt*"))


def test_a_killed_run_goes_on_from_its_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records may be ahead of the state; what is ahead is trained again."""
    straight = run(chosen(), place(tmp_path / "straight"))
    monkeypatch.setattr(runner, "_SAVE_EVERY", 0.0)
    with pytest.raises(Interrupted):
        run(chosen(), place(tmp_path / "killed"), on_epoch=after(3))
    folder = place(tmp_path / "killed").folder(chosen())
    records.save(folder, straight)  # as if all epochs had been recorded, but only three saved
    (folder / "epochs.jsonl").write_text("".join((folder / "epochs.jsonl").read_text().splitlines(True)[:-1]))
    resumed = run(chosen(), place(tmp_path / "killed"))
    assert [record.loss for record in resumed.epochs] == [record.loss for record in straight.epochs]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(chosen(), place(tmp_path), on_epoch=after(2))
    state = place(tmp_path).folder(chosen()) / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"state.pt cannot be read .*; remove the folder"):
        run(chosen(), place(tmp_path))


@pytest.mark.parametrize("text", ["", "{", '{"config": {}}', "[]"])
def test_damaged_records_are_named(tmp_path: Path, text: str) -> None:
    run(chosen(), place(tmp_path))
    folder = place(tmp_path).folder(chosen())
    (folder / "run.json").write_text(text)
    with pytest.raises(ValueError, match=f"{folder} holds no run that can be read"):
        load_all(tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    done = run(chosen(lr=1e30, momentum=0.9), place(tmp_path))
    assert done.info.stopped is not None
    assert "not finite after" in done.info.stopped
    assert done.complete
    assert len(done.epochs) < 7
    assert load(place(tmp_path).folder(done.config)).info.stopped == done.info.stopped


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(chosen(), place(tmp_path))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run(chosen(seed=2), place(tmp_path))
    assert load_all(tmp_path) == [before]
    assert not list(tmp_path.rglob("*.partial"))


def test_the_command_repeats_the_run() -> None:
    config = chosen(order="pair+walk", lr=0.3, partition="dirichlet:0.5", variant="mlp", workers=2, batch_size=8)
    words = command(config).split()
    assert words[:3] == ["cdgrab", "run", "digits"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--order": "pair+walk", "--seed": "1", "--variant": "mlp", "--workers": "2", "--batch": "8", "--epochs": "6",
        "--lr": "0.3", "--partition": "dirichlet:0.5",
    }  # fmt: skip


def test_the_estimate_is_about_right(tmp_path: Path) -> None:
    config = chosen(epochs=20)
    told = estimate(config, place(tmp_path), seconds=0.5)
    taken = run(config, place(tmp_path)).epochs[-1].seconds
    assert taken / 5 < told < taken * 5  # a shared machine; an estimate off by the number of epochs would show


def test_ctrl_c_saves_and_says_so(tmp_path: Path) -> None:
    arguments = ["run", "digits", "--epochs", "100000", "--results", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cdgrab", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("run.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Everything is saved in" in errors
    (found,) = load_all(tmp_path)
    assert len(found.epochs) > 1
    assert torch.load(next(tmp_path.rglob("state.pt")), weights_only=True)["trained"] == found.epochs[-1].epoch

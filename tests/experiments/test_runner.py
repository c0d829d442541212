"""Runs on disk: complete, interrupted, resumed, damaged, diverged."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cdgrab_experiments import records, runner
from cdgrab_experiments.choices import Choices, command, resolve
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.interrupts import interruptible, stop_if_asked
from cdgrab_experiments.records import EpochRecord, load, load_all
from cdgrab_experiments.runner import Interrupted, Place, estimate, find_run, run
from cdgrab_experiments.steps import EagerSteps


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
    records.save(folder, replace(straight, epochs=straight.epochs[:-1]))  # five are recorded, but only three saved
    resumed = run(chosen(), place(tmp_path / "killed"))
    assert [record.loss for record in resumed.epochs] == [record.loss for record in straight.epochs]


def test_an_interruption_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from the end of the epoch before, momentum included."""
    straight = run(chosen(momentum=0.9), place(tmp_path / "straight"))
    steps, observe = 0, EagerSteps._in_closed_form

    def interrupted(self: EagerSteps, batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3 * 384 + 100:  # of the fourth epoch
            raise KeyboardInterrupt
        observe(self, batch)

    monkeypatch.setattr(EagerSteps, "_in_closed_form", interrupted)
    with pytest.raises(Interrupted) as stopped:
        run(chosen(momentum=0.9), place(tmp_path / "broken"))
    assert stopped.value.epochs == 3
    resumed = run(chosen(momentum=0.9), place(tmp_path / "broken"))
    assert [record.loss for record in resumed.epochs] == [record.loss for record in straight.epochs]


def test_a_state_ahead_of_its_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(chosen(), place(tmp_path), on_epoch=after(3))
    lines = place(tmp_path).folder(chosen()) / "epochs.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(True)[:-1]))
    with pytest.raises(ValueError, match="has a state after 3 epochs and no record of it"):
        run(chosen(), place(tmp_path))


def test_a_run_goes_on_only_where_it_was_begun(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(chosen(), place(tmp_path), on_epoch=after(3))
    file = place(tmp_path).folder(chosen()) / "state.pt"
    state = torch.load(file, weights_only=True)
    torch.save({**state, "where": "1 rank, cuda"}, file)
    with pytest.raises(ValueError, match="'1 rank, cuda', which is '1 rank, cpu' now"):
        run(chosen(), place(tmp_path))


def test_runs_on_other_data_are_refused(tmp_path: Path) -> None:
    done = run(chosen(), place(tmp_path))
    folder = place(tmp_path).folder(chosen())
    records.save(folder, replace(done, info=replace(done.info, data="something else")))
    with pytest.raises(ValueError, match=r"was made with other data \(something else\)"):
        run(chosen(), place(tmp_path))


def test_nobody_else_works_on_the_same_run(tmp_path: Path) -> None:
    def again(record: EpochRecord) -> None:
        if record.epoch == 1:
            with pytest.raises(ValueError, match="another process is working on the run"):
                run(chosen(), place(tmp_path))

    assert run(chosen(), place(tmp_path), on_epoch=again).complete


def test_a_metric_that_is_not_finite_survives(tmp_path: Path) -> None:
    done = run(chosen(), place(tmp_path))
    odd = replace(done.epochs[2], metrics={"accuracy": float("nan")})
    folder = place(tmp_path).folder(chosen())
    records.save(folder, replace(done, epochs=[*done.epochs[:2], odd, *done.epochs[3:]]))
    records.save(folder, load(folder))
    assert str(load(folder).epochs[2].metrics["accuracy"]) == "nan"


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"digits needs the package sklearn.datasets: pip install"):
        run(chosen(), place(tmp_path))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(chosen(), place(tmp_path), on_epoch=after(2))
    state = place(tmp_path).folder(chosen()) / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"state.pt cannot be read .*remove the folder"):
        run(chosen(), place(tmp_path))


def test_a_state_of_another_release_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(chosen(), place(tmp_path), on_epoch=after(2))
    file = place(tmp_path).folder(chosen()) / "state.pt"
    state = torch.load(file, weights_only=True)
    state["ordering"]["version"] = 1
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"version 1, this release .* or remove the folder .* to begin this run anew"):
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

    monkeypatch.setattr(os, "fsync", full)  # of records and states alike
    told = re.escape(f"cannot write {place(tmp_path).folder(chosen(seed=2)) / 'epochs.jsonl'}: No space left on device")
    with pytest.raises(ValueError, match=told):
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


def test_an_interruption_that_got_lost_is_remembered() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        interruptible()
        stop_if_asked()
        for which in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(KeyboardInterrupt):  # as a callback's caller does
                signal.raise_signal(which)
            with pytest.raises(KeyboardInterrupt):
                stop_if_asked()
            interruptible()
            stop_if_asked()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


# Stands in for the package: remembers the last epoch that each run has come to.
WANDB = """
import pathlib

class init:
    def __init__(self, *, name, dir, **_):
        self.path = pathlib.Path(dir) / f"{name}.epoch"

    def log(self, figures, step):
        self.path.write_text(str(step))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "jobs"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_interrupted_commands_save_and_say_so(how: signal.Signals, jobs: int, tmp_path: Path) -> None:
    """Only the process that was started gets the signal; those it has started must end with it."""
    (tmp_path / "wandb.py").write_text(WANDB)
    command = ["cdgrab", "compare", "digits", "--epochs", "100000", "--seeds", "1", "--jobs", str(jobs)]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--results", str(tmp_path), "--log", "wandb"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:  # a few epochs, which nothing but the interruption saves
        epochs = [int(path.read_text() or 0) for path in tmp_path.glob("*.epoch")]
        if len(epochs) == jobs and min(epochs) > 2:
            break
        time.sleep(0.05)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "The same command goes on from there." in " ".join(errors.split())
    found = load_all(tmp_path)
    assert len(found) == jobs
    for one in found:
        assert len(one.epochs) > 1
        state = tmp_path / "digits" / one.config.folder_name / "state.pt"
        assert torch.load(state, weights_only=True)["trained"] == one.epochs[-1].epoch

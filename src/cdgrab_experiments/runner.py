"""From a configuration to a folder of records: skips what is there, goes on where it stopped, never half-writes."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cdgrab import balance_vectors
from cdgrab_experiments import records
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.interrupts import uninterrupted
from cdgrab_experiments.records import EpochRecord, Run, RunInfo
from cdgrab_experiments.saved_state import read_state, write_state
from cdgrab_experiments.tasks import find_task
from cdgrab_experiments.tasks.base import Problem
from cdgrab_experiments.train import Trainer
from cdgrab_experiments.whole_files import alone, create, sweep

_SAVE_EVERY = 20.0  # seconds
# By task, variant and data folder: smallest training losses, and lines on the data.
_MINIMA: dict[tuple[str, str, Path], float] = {}
_DATA: dict[tuple[str, str, Path], str] = {}


class Interrupted(Exception):
    """Runs were stopped by the user.

    Attributes:
        path: What has been saved; None if there was nothing to save.
        epochs: How far that run had come.
    """

    def __init__(self, path: Path | None, epochs: int) -> None:
        super().__init__(path, epochs)  # both, so that it can be sent from one process to another
        self.path, self.epochs = path, epochs

    def __str__(self) -> str:
        if self.path is None:
            return "Interrupted before anything was trained; runs that were complete are kept."
        what = f"Interrupted after {self.epochs} epochs, which are saved in {self.path}."
        return f"{what} The same command goes on from there."


@dataclass(frozen=True)
class Place:
    """Where runs happen and where their records go.

    Attributes:
        jobs: How many runs there are at a time; for the record, since their seconds then tell little.
    """

    results: Path
    data: Path
    device: str = "cpu"
    jobs: int = 1

    def folder(self, config: RunConfig) -> Path:
        return self.results / config.task / config.folder_name


def find_run(config: RunConfig, place: Place) -> Run | None:
    """The run as far as it has come, if it has been begun; raises `ValueError` if it was damaged."""
    path = place.folder(config)
    if not (path / "run.json").exists():
        if (path / "state.pt").exists():
            raise ValueError(f"{path} has a state and no run.json; restore it, or remove the folder to begin anew")
        return None
    found = records.load(path)
    if found.config != config:
        raise ValueError(f"{path} holds another run than its name says; move it away to do this one")
    return found


def run(
    config: RunConfig,
    place: Place,
    *,
    command: str = "",
    on_epoch: Callable[[EpochRecord], None] = lambda _: None,
) -> Run:
    """Do what is left of a run.

    Args:
        config: What to do.
        place: Where.
        command: What to type to repeat it, for the record.
        on_epoch: Is told of every epoch, those on disk included.

    Returns:
        The complete run; `info.stopped` says why, if it ended before its time.
    """
    found = find_run(config, place)
    if found is not None and found.complete:
        return _again(found, place, on_epoch)
    problem = _loaded(config, place)
    if torch.device(place.device).index is not None:
        torch.cuda.set_device(place.device)
    balance_vectors(torch.zeros(1, 2, 3))  # compile before the clock runs
    trainer = Trainer(config, problem, device=place.device)
    running = _Running(config, place, trainer, _info(config, problem, place, command))
    with alone(running.path) if running.writes else contextlib.nullcontext():
        found = find_run(config, place)
        if found is not None and found.complete and running.ranks == 1:  # another process was faster
            return _again(found, place, on_epoch)
        if running.writes:
            sweep(running.path)
        return running.to_the_end(on_epoch)


def _again(found: Run, place: Place, on_epoch: Callable[[EpochRecord], None]) -> Run:
    """A run that is complete, told once more."""
    _check_data(found, place)
    (place.folder(found.config) / "state.pt").unlink(missing_ok=True)  # interrupted when all was done
    for record in found.epochs:
        on_epoch(record)
    return found


def _loaded(config: RunConfig, place: Place) -> Problem:
    task = find_task(config.task)
    try:
        problem = task.load(place.data, config.variant, config.seed)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'the task {task.name} needs the package {error.name}: pip install "cdgrab[experiments,text]"'
        ) from error
    _DATA[config.task, config.variant, place.data] = problem.data
    if problem.gradient is not None and place.device == "cpu":
        torch.set_num_threads(1)  # models this small only lose by a second thread
    return problem


def _check_data(found: Run, place: Place) -> None:
    """Refuse a run that was made with other data than are in the data folder now; without data there is no telling."""
    config = found.config
    key = (config.task, config.variant, place.data)
    if key not in _DATA:
        try:
            _loaded(config, place)
        except ValueError:
            return
    if _DATA[key] != found.info.data:
        raise ValueError(
            f"{place.folder(config)} was made with other data ({found.info.data}) than are there now ({_DATA[key]}); "
            "choose another folder with --results"
        )


class _Running:
    def __init__(self, config: RunConfig, place: Place, trainer: Trainer, info: RunInfo) -> None:
        self.config, self.place, self.path, self.trainer = config, place, place.folder(config), trainer
        self.ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.writes = self.ranks == 1 or dist.get_rank() == 0
        self.info = info
        self.epochs: list[EpochRecord] = []
        self.snapshot: dict[str, Any] | None = None
        self.saved_at = time.monotonic()

    def to_the_end(self, on_epoch: Callable[[EpochRecord], None]) -> Run:
        self._resume()
        for record in self.epochs:
            on_epoch(record)
        done: Run | None = None
        try:
            for record in self.trainer.run():
                self._add(record)
                on_epoch(record)
                if not math.isfinite(record.loss):
                    reason = f"the loss is not finite after {record.epoch} epochs; a smaller --lr may help"
                    self.info = replace(self.info, stopped=reason)
                    break
            with uninterrupted():
                done = self._finish()
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt), uninterrupted():  # asked once more
                if self.ranks == 1 and done is None:
                    self._save_state()
            trained = None if self.snapshot is None else self.snapshot["trained"]
            raise Interrupted(None if trained is None else self.path, trained or 0) from None
        return done

    def _finish(self) -> Run:
        done = Run(self.config, self.info, self.epochs)
        if self.writes:
            records.save(self.path, done)
            (self.path / "state.pt").unlink(missing_ok=True)
        return done

    def _add(self, record: EpochRecord) -> None:
        # The record first: if it is ahead of the state, its epoch is trained again; the other way round it were lost.
        self.epochs.append(record)
        self.snapshot = self._state()
        first = len(self.epochs) == 1  # a folder that cannot be written shows now, not after hours
        if first or self.ranks > 1 or time.monotonic() - self.saved_at > _SAVE_EVERY:
            self._save_state()

    def _state(self) -> dict[str, Any]:
        return {**self.trainer.state_dict(), "where": self.where}

    @property
    def where(self) -> str:
        """What cannot change in the middle of a run."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.trainer.device.type}"

    def _save_state(self) -> None:
        if self.snapshot is None or not self.writes:
            return
        known = [record for record in self.epochs if record.epoch <= self.snapshot["trained"]]
        records.save(self.path, Run(self.config, self.info, known))
        write_state(self.path / "state.pt", self.snapshot)
        self.saved_at = time.monotonic()

    def _resume(self) -> None:
        file, anew = self.path / "state.pt", f"remove the folder {self.path} to begin this run anew"
        found = find_run(self.config, self.place)
        if found is None:
            return
        if not file.exists():
            if len(found.epochs) > 1:  # the first is written just before the first state
                raise ValueError(
                    f"{self.path} has records of {len(found.epochs) - 1} epochs and no state to go on from; restore "
                    f"{file.name} or the end of epochs.jsonl, or {anew}"
                )
            return
        try:
            state = read_state(file)
        except ValueError as error:
            raise ValueError(f"{error}; restore it from a copy, or {anew}") from error
        self.epochs = [record for record in found.epochs if record.epoch <= state["trained"]]
        begun = {"where it runs": (state["where"], self.where), "its data": (found.info.data, self.info.data)}
        for what, (before, now) in begun.items():
            if before != now:
                raise ValueError(
                    f"the run in {self.path} was begun with {what} being {before!r}, which is {now!r} now; go on as "
                    "before, or remove the folder to begin it anew"
                )
        if not self.epochs or self.epochs[-1].epoch != state["trained"]:
            raise ValueError(
                f"{self.path} has a state after {state['trained']} epochs and no record of it; remove the folder to "
                "begin this run anew"
            )
        try:
            self.trainer.load_state_dict(state, self.epochs[-1])
        except Exception as error:  # modules and optimizers answer a state that is not theirs in many ways
            raise ValueError(f"{file} does not fit this run ({error}); restore it, or {anew}") from error
        earlier = [part for part in found.info.environment.get("before", []) if part]
        last = {key: value for key, value in found.info.environment.items() if key != "before"}
        if last != self.info.environment or earlier:
            self.info = replace(self.info, environment={**self.info.environment, "before": [*earlier, last]})


def _info(config: RunConfig, problem: Problem, place: Place, command: str) -> RunInfo:
    key = (config.task, config.variant, place.data)
    if problem.minimum is not None and key not in _MINIMA:
        _MINIMA[key] = problem.minimum()
    return RunInfo(
        metric=problem.metric,
        higher_is_better=problem.higher_is_better,
        data=problem.data,
        num_examples=len(problem.train[0]),
        dim=sum(p.numel() for p in problem.model.parameters() if p.requires_grad),
        minimum=_MINIMA.get(key),
        environment={**records.environment(place.device), "runs at a time": place.jobs},
        command=command,
    )


def check_writable(folder: Path) -> None:
    """Refuse a results folder that cannot be written to, before hours of training."""
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        create(probe).close()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another folder with --results") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def estimate(config: RunConfig, place: Place, seconds: float = 2.0) -> float:
    """Seconds the run would take, from some of its first steps; nothing is written."""
    problem = _loaded(config, place)
    balance_vectors(torch.zeros(1, 2, 3))
    # Refuses what the run would refuse; on a model of its own, which it may attach to an ordering.
    Trainer(config, replace(problem, model=copy.deepcopy(problem.model)), device=place.device)
    few = min(len(problem.train[0]), 64 * config.batch_size)
    some = replace(problem, train=tuple(part[:few] for part in problem.train), labels=None)
    trainer = Trainer(replace(config, partition="iid"), some, device=place.device)
    trainer.epoch()  # warms up
    start, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - start < seconds:
        trainer.epoch()
        done += 1
    share = few / len(problem.train[0])
    return (time.perf_counter() - start) / done / share * config.epochs

"""From a configuration to a folder of records: skips what is there, goes on where it stopped, never half-writes."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cdgrab import balance_vectors
from cdgrab.paper import records
from cdgrab.paper.config import RunConfig
from cdgrab.paper.records import EpochRecord, Run, RunInfo
from cdgrab.paper.tasks import find_task
from cdgrab.paper.tasks.base import Problem
from cdgrab.paper.train import Trainer

_SAVE_EVERY = 20.0  # seconds
_MINIMA: dict[tuple[str, str, Path], float] = {}  # of training losses; the same for all runs on the same data


class Interrupted(Exception):
    """A run was stopped by the user; `path` is where it can go on."""

    def __init__(self, path: Path, epochs: int) -> None:
        super().__init__(f"stopped after {epochs} epochs")
        self.path, self.epochs = path, epochs


@dataclass(frozen=True)
class Place:
    """Where runs happen and where their records go."""

    results: Path
    data: Path
    device: str = "cpu"
    capture: bool | None = None

    def folder(self, config: RunConfig) -> Path:
        return self.results / config.task / config.folder_name


def find_run(config: RunConfig, place: Place) -> Run | None:
    """The run as far as it has come, if it has been begun."""
    path = place.folder(config)
    return records.load(path) if (path / "run.json").exists() else None


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
        (place.folder(config) / "state.pt").unlink(missing_ok=True)  # interrupted when all was done
        for record in found.epochs:
            on_epoch(record)
        return found
    problem = find_task(config.task).load(place.data, config.variant, config.seed)
    if problem.rows is not None and place.device == "cpu":
        torch.set_num_threads(1)  # models this small only lose by a second thread
    balance_vectors(torch.zeros(1, 2, 3))  # compile before the clock runs
    trainer = Trainer(config, problem, device=place.device, capture=place.capture)
    return _Running(config, place, trainer, _info(config, problem, place, command)).to_the_end(on_epoch)


class _Running:
    def __init__(self, config: RunConfig, place: Place, trainer: Trainer, info: RunInfo) -> None:
        self.config, self.path, self.trainer = config, place.folder(config), trainer
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
        try:
            for record in self.trainer.run():
                self._add(record)
                on_epoch(record)
                if not math.isfinite(record.loss):
                    reason = f"the loss is not finite after {record.epoch} epochs; a smaller --lr may help"
                    self.info = replace(self.info, stopped=reason)
                    break
        except KeyboardInterrupt:
            if self.ranks == 1:
                self._save_state()
            raise Interrupted(self.path, len(self.epochs) - 1 if self.epochs else 0) from None
        done = Run(self.config, self.info, self.epochs)
        if self.writes:
            records.save(self.path, done)
            (self.path / "state.pt").unlink(missing_ok=True)
        return done

    def _add(self, record: EpochRecord) -> None:
        # The snapshot first: an interruption in between costs the record, which the epoch done again brings back.
        self.snapshot = self._state()
        self.epochs.append(record)
        first = len(self.epochs) == 1  # a folder that cannot be written shows now, not after hours
        if first or self.ranks > 1 or time.monotonic() - self.saved_at > _SAVE_EVERY:
            self._save_state()

    def _state(self) -> dict[str, Any]:
        state = self.trainer.state_dict()
        if self.ranks > 1:  # every rank has an order of its own
            orderings: list[Any] = [None] * self.ranks
            dist.all_gather_object(orderings, state["ordering"])
            state["ordering"] = orderings
        return state

    def _save_state(self) -> None:
        if self.snapshot is None or not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / "state.pt.partial"
        try:
            torch.save(self.snapshot, partial)
            partial.replace(self.path / "state.pt")
        finally:
            partial.unlink(missing_ok=True)
        known = [record for record in self.epochs if record.epoch <= self.snapshot["trained"]]
        records.save(self.path, Run(self.config, self.info, known))
        self.saved_at = time.monotonic()

    def _resume(self) -> None:
        file = self.path / "state.pt"
        if not (file.exists() and (self.path / "run.json").exists()):
            return
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}); remove the folder {self.path} to begin this run anew"
            ) from error
        found = records.load(self.path)
        self.epochs = [record for record in found.epochs if record.epoch <= state["trained"]]
        if self.ranks > 1:
            state["ordering"] = state["ordering"][dist.get_rank()]
        self.trainer.load_state_dict(state, self.epochs[-1])


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
        environment=records.environment(place.device),
        command=command,
    )


def check_writable(folder: Path) -> None:
    """Refuse a results folder that cannot be written to, before hours of training."""
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another folder with --results") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def estimate(config: RunConfig, place: Place, seconds: float = 2.0) -> float:
    """Seconds the run would take, from some of its first steps; nothing is written."""
    problem = find_task(config.task).load(place.data, config.variant, config.seed)
    balance_vectors(torch.zeros(1, 2, 3))
    few = min(len(problem.train[0]), 64 * config.batch_size)
    some = replace(problem, train=tuple(part[:few] for part in problem.train), labels=None)
    trainer = Trainer(replace(config, partition="iid"), some, device=place.device, capture=place.capture)
    trainer.epoch()  # warms up
    start, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - start < seconds:
        trainer.epoch()
        done += 1
    share = few / len(problem.train[0])
    return (time.perf_counter() - start) / done / share * config.epochs

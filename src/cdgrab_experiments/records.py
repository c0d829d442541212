"""Results on disk: a folder per run, with everything needed to repeat it and one JSON line per epoch.

    RESULTS/TASK/ORDER_w4_seed0_1a2b3c4d/run.json       configuration, versions, hardware, problem
                                         epochs.jsonl   epoch 0 is the state before training
                                         state.pt       where to go on; gone when the run is complete

Every file is written under another name and then renamed, so that it is whole or absent.

Every line of `epochs.jsonl` ends with a digest of the configuration and of all lines up to it, so that a line that was
lost, swapped or edited shows. The `run.json` of a complete run has a digest of itself and of the last line. Records
of cdgrab 0.1 have no digests: they are read, and only their types and the sequence of their epochs are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cdgrab
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.schema import build, parse
from cdgrab_experiments.whole_files import write_whole

_MOST_SECONDS = 1e12  # sums of so many stay finite


@dataclass(frozen=True)
class EpochRecord:
    """What an epoch left behind.

    Attributes:
        epoch: How many epochs have been trained.
        loss: Of the whole training set.
        metrics: On data that are not trained on.
        seconds: Of training from the start of the run, evaluation left out; the four below sum up to it.
        seconds_data: Fetching batches.
        seconds_compute: Forward, backward and the optimizer's step.
        seconds_exchange: Averaging gradients in closed form between ranks; what DistributedDataParallel does counts as
            computing.
        seconds_sorter: Finding the next order, with what it takes to bring rows of several ranks together. On a GPU,
            where that goes on beside training, only what training waited for it.
        bytes: Sent by this rank for ordering, from the start of the run.
        imbalance: `Ordering.metrics()["imbalance"]` of the epoch.
        herding_bound: Of the order about to be used, for the gradients at that point, where these are few enough.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    seconds: float = 0.0
    seconds_data: float = 0.0
    seconds_compute: float = 0.0
    seconds_exchange: float = 0.0
    seconds_sorter: float = 0.0
    bytes: int = 0
    imbalance: float | None = None
    herding_bound: float | None = None


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run beside its configuration.

    Attributes:
        metric: The metric that counts.
        higher_is_better: Of the metric.
        data: One line on the data.
        num_examples: Units in the training set.
        dim: Length of a gradient.
        minimum: The smallest possible training loss, where it is known.
        environment: Versions and hardware; `"before"` has those of earlier parts, if the run was interrupted.
        command: What to type to repeat the run.
        stopped: Why the run ended before its time, if it did.
    """

    metric: str
    higher_is_better: bool
    data: str
    num_examples: int
    dim: int
    minimum: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    stopped: str | None = None

    @property
    def at_a_time(self) -> int:
        """How many runs there were at a time, at most."""
        parts = [self.environment, *self.environment.get("before", [])]
        return max(int(part.get("runs at a time", 1)) for part in parts)


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk."""

    config: RunConfig
    info: RunInfo
    epochs: list[EpochRecord]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.info.stopped is not None or (bool(self.epochs) and self.epochs[-1].epoch >= self.config.epochs)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "cdgrab": cdgrab.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name() if device.startswith("cuda") else _processor(),
        "threads": torch.get_num_threads(),
    }


def save(path: Path, run: Run) -> None:
    """Write `run` into the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    digest, lines = _next_digest("", asdict(run.config)), []
    for record in run.epochs:
        plain = _finite(asdict(record))
        digest = _next_digest(digest, plain)
        lines.append(json.dumps({**plain, "digest": digest}))
    head = {"config": asdict(run.config), **asdict(run.info)}
    if run.complete:  # before, a crash between the two files may leave more lines than run.json knows of
        head["digest"] = _next_digest(digest, head)
    write_whole(path / "epochs.jsonl", "\n".join(lines) + "\n")
    write_whole(path / "run.json", json.dumps(head, indent=1) + "\n")


def load_all(folder: Path) -> list[Run]:
    """All runs anywhere below `folder`, in the order of their names; raises `ValueError` if one cannot be read."""
    runs, damaged = load_readable(folder)
    if damaged:
        raise ValueError(damaged[0])
    return runs


def load_readable(folder: Path) -> tuple[list[Run], list[str]]:
    """All runs anywhere below `folder` that can be read, in the order of their names, and a line on every other."""
    runs, damaged = [], []
    for path in sorted(folder.rglob("run.json")):
        try:
            runs.append(load(path.parent))
        except ValueError as error:
            damaged.append(str(error))
    return runs, damaged


def load(path: Path) -> Run:
    """Read the run in the folder `path`; raises `ValueError` if it was damaged or edited."""
    try:
        head = parse(_text(path / "run.json"))
        if not isinstance(head, dict) or "config" not in head:
            raise ValueError("run.json has no configuration")
        last = head.pop("digest", None)
        config = RunConfig.from_dict(head["config"])
        info = build(RunInfo, {key: value for key, value in head.items() if key != "config"})
        _check_parts(info.environment)
        begin = _next_digest("", head["config"])
        epochs, digest, signed = _epochs(_text(path / "epochs.jsonl"), begin)
        if not signed and epochs and not str(info.environment.get("cdgrab", "0.1.")).startswith("0.1."):
            raise ValueError("epochs.jsonl has no digests, which records have since cdgrab 0.2")
        if last is not None and last != _next_digest(digest, head):
            raise ValueError("run.json or the end of epochs.jsonl was edited or lost after the run was complete")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} holds no run that can be read ({error}); restore its files from a copy, or remove the folder to "
            "do the run again"
        ) from error
    return Run(config, info, epochs)


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path.name} is not there, or is no file")
    return path.read_text(encoding="utf-8")


def _epochs(text: str, digest: str) -> tuple[list[EpochRecord], str, bool]:
    """The records in the lines of `text`, the digest of all of them, and whether they have digests."""
    epochs, signed = [], False
    for number, line in enumerate(text.rstrip("\n").split("\n") if text.strip() else []):
        try:
            found = parse(line)
            stamp = found.pop("digest", None) if isinstance(found, dict) else None
            if number == 0:
                signed = stamp is not None
            record = build(EpochRecord, found, null_is_nan=True)
            _check_sums(record)
            digest = _next_digest(digest, found)
            if record.epoch != number or (signed and stamp != digest) or (stamp is not None) != signed:
                raise ValueError("it does not follow from the lines before; a line was lost, swapped or edited")
        except ValueError as error:
            raise ValueError(f"line {number + 1} of epochs.jsonl: {error}") from error
        epochs.append(record)
    return epochs, digest, signed


def _next_digest(before: str, content: dict[str, Any]) -> str:
    """Of what is in the file, so that reading and writing agree however numbers are spelt."""
    return hashlib.sha256(f"{before} {json.dumps(content)}".encode()).hexdigest()[:16]


def _check_sums(record: EpochRecord) -> None:
    for name, value in asdict(record).items():
        if name.startswith("seconds") and not (math.isnan(value) or 0 <= value <= _MOST_SECONDS):
            raise ValueError(f"{name} is {value:g}; expected seconds from 0 on")
    if record.bytes < 0:
        raise ValueError(f"bytes is {record.bytes}; expected a number from 0 on")


def _check_parts(environment: dict[str, Any]) -> None:
    """What `RunInfo.at_a_time` relies on."""
    before = environment.get("before", [])
    for part in [environment, *(before if isinstance(before, list) else [None])]:
        jobs = None if part is None else part.get("runs at a time", 1)
        if not isinstance(jobs, int) or isinstance(jobs, bool):
            raise ValueError("its environment has no number of runs at a time, or one that is no number")


def settings(runs: Iterable[Run]) -> dict[RunConfig, list[Run]]:
    """Runs that belong in one comparison, together."""
    groups: dict[RunConfig, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.setting, []).append(run)
    return groups


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    plain["metrics"] = {key: value if math.isfinite(value) else None for key, value in record["metrics"].items()}
    return plain


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"

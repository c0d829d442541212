"""Results on disk: a folder per run, with everything needed to repeat it and one JSON line per epoch.

    RESULTS/TASK/ORDER_w4_seed0_1a2b3c4d/run.json       configuration, versions, hardware, problem
                                         epochs.jsonl   epoch 0 is the state before training
                                         state.pt       where to go on; gone when the run is complete

Every file is written under another name and then renamed, so that it is whole or absent.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cdgrab
from cdgrab_experiments.config import RunConfig


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
    lines = [json.dumps(_finite(asdict(record))) for record in run.epochs]
    write_whole(path / "epochs.jsonl", "\n".join(lines) + "\n")
    write_whole(path / "run.json", json.dumps({"config": asdict(run.config), **asdict(run.info)}, indent=1) + "\n")


def load(path: Path) -> Run:
    """Read the run in the folder `path`."""
    try:
        found = json.loads((path / "run.json").read_text())
        config = RunConfig.from_dict(found.pop("config"))
        info = RunInfo(**found)
        lines = (path / "epochs.jsonl").read_text().splitlines()
        epochs = [_record(json.loads(line)) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no run that can be read ({error}); remove the folder to do it again") from error
    return Run(config, info, epochs)


def load_all(folder: Path) -> list[Run]:
    """All runs anywhere below `folder`, in the order of their names."""
    return [load(path.parent) for path in sorted(folder.rglob("run.json"))]


def settings(runs: Iterable[Run]) -> dict[RunConfig, list[Run]]:
    """Runs that belong in one comparison, together."""
    groups: dict[RunConfig, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.setting, []).append(run)
    return groups


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, which is whole or absent whatever happens."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _record(found: dict[str, Any]) -> EpochRecord:
    known = {field.name for field in fields(EpochRecord)}
    found["loss"] = math.nan if found["loss"] is None else found["loss"]
    found["metrics"] = {key: math.nan if value is None else value for key, value in found["metrics"].items()}
    return EpochRecord(**{key: value for key, value in found.items() if key in known})


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

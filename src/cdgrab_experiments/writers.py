"""Optional company for the records: TensorBoard and Weights & Biases, the latter offline."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.records import EpochRecord

Writer = Callable[[RunConfig, EpochRecord], None]


def figures(record: EpochRecord) -> dict[str, float]:
    """The numbers of an epoch under flat names."""
    flat = {key: value for key, value in asdict(record).items() if isinstance(value, (int, float)) and key != "epoch"}
    return {**flat, **{f"metrics/{key}": value for key, value in record.metrics.items()}}


def tensorboard(folder: Path) -> Writer:
    """Event files beside the records."""
    module = _module("torch.utils.tensorboard", "tensorboard")
    open_: dict[RunConfig, Any] = {}

    def write(config: RunConfig, record: EpochRecord) -> None:
        if config not in open_:
            open_[config] = module.SummaryWriter(str(folder / "tensorboard" / config.task / config.folder_name))
        for name, value in figures(record).items():
            open_[config].add_scalar(name, value, record.epoch)
        open_[config].flush()

    return write


def wandb(folder: Path) -> Writer:
    """Runs that `wandb sync` can upload later; nothing leaves the machine before that."""
    module = _module("wandb", "wandb")
    open_: dict[RunConfig, Any] = {}

    def write(config: RunConfig, record: EpochRecord) -> None:
        if config not in open_:
            open_[config] = module.init(
                project="cdgrab",
                name=config.folder_name,
                group=config.task,
                config=asdict(config),
                mode="offline",
                dir=str(folder),
                reinit="create_new",
            )
        open_[config].log(figures(record), step=record.epoch)
        if record.epoch == config.epochs:
            open_.pop(config).finish()

    return write


WRITERS: dict[str, Callable[[Path], Writer]] = {"tensorboard": tensorboard, "wandb": wandb}


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--log {package} needs the package {package}: pip install {package}") from error

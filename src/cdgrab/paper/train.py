"""One training loop: simulated workers, plain SGD, one example per worker and step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cdgrab import Ordering, World, herding_bound
from cdgrab.paper.tasks.digits import Network


@dataclass(frozen=True)
class RunConfig:
    """What one run does."""

    name: str
    model: Network
    order: str
    workers: int
    step_size: float
    epochs: int
    seed: int


@dataclass(frozen=True)
class EpochRecord:
    """What an epoch left behind. `seconds` counts training alone, from the start of the run."""

    epoch: int
    loss: float
    seconds: float
    ordering_seconds: float
    herding_bound: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(config: RunConfig, x: Tensor, y: Tensor) -> Iterator[EpochRecord]:
    """Train and yield a record after every epoch; the first one, epoch 0, is the state before training.

    The herding bound of a record is that of the order about to be used, for the gradients at that point.
    """
    model, theta = config.model, config.model.init(config.seed)
    world = World.simulated(config.workers)
    ordering = Ordering(
        len(x), batch_size=config.workers, unit_size=1, order=config.order, world=world, seed=config.seed
    )
    seconds = ordering_seconds = 0.0
    for epoch in range(config.epochs + 1):
        ordering.sampler.set_epoch(epoch)
        vectors_WUD = model.rows(theta, x, y)[torch.stack(ordering.orders)]
        loss = float(model.loss(theta, x, y))
        yield EpochRecord(epoch, loss, seconds, ordering_seconds, herding_bound(vectors_WUD))
        if epoch == config.epochs:
            return
        start = time.perf_counter()
        for batch in torch.tensor(list(ordering.sampler)).split(config.workers):
            rows = model.rows(theta, x[batch], y[batch])
            ordering.observe(rows)
            theta.sub_(rows.mean(0), alpha=config.step_size)
        seconds += time.perf_counter() - start
        ordering_seconds += ordering.metrics()["seconds"]

"""Which worker gets which example: evenly, or as unlike each other as one wishes.

An `Ordering` deals positions to workers; here it is decided which example lies at which position. So every order, rule
and exchange works on every split.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cdgrab import ORDERS, Ordering, World
from cdgrab_experiments.config import RunConfig

KINDS = "iid, sorted (by class) or dirichlet:ALPHA (ALPHA above 0; the smaller, the fewer classes a worker has)"


def check_partition(partition: str) -> None:
    """Refuse what is no split."""
    kind, _, alpha = partition.partition(":")
    if partition in ("iid", "sorted"):
        return
    try:
        fine = kind == "dirichlet" and 0 < float(alpha) < float("inf")
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"unknown partition {partition!r}; choose {KINDS}")


def placed(config: RunConfig, labels_N: Tensor | None, num: int, shards: int | None = None) -> Tensor:
    """The example at every position.

    Args:
        config: Of the run: its partition, order, workers and seed.
        labels_N: The class of every example.
        num: Number of examples.
        shards: Into how many stretches the examples are cut, one for every worker; None if workers may get any.
    """
    check_partition(config.partition)
    if shards is not None and (config.partition, config.workers, config.batch_size) != ("iid", shards, shards):
        raise ValueError(
            f"{config.partition} split, {config.workers} workers, batches of {config.batch_size}: the data of "
            f"{config.task} are cut into {shards} stretches, one for each worker, of which a step takes one unit each; "
            f"use an iid split, {shards} workers and batches of {shards}, or another variant"
        )
    if config.partition == "iid" and shards is None:
        return torch.arange(num)
    if labels_N is None and shards is None:
        raise ValueError(f"partition {config.partition!r} needs classes, which this task has none of; use iid")
    workers, seed, partition = config.workers, config.seed, config.partition
    # Real ranks are dealt the same positions, but would see only their own.
    dealt = Ordering(
        num, batch_size=workers, unit_size=1, order=config.order, lanes=workers, seed=seed, world=World(0, 1)
    )
    positions = [order.numpy() for order in dealt.orders]
    rng = np.random.default_rng([seed, 0x5B117])
    sizes = [len(mine) for mine in positions]
    if labels_N is None or shards is not None:
        parts = np.split(np.arange(num), np.cumsum(sizes)[:-1])
    elif partition == "sorted":
        parts = np.split(np.argsort(labels_N.numpy(), kind="stable"), np.cumsum(sizes)[:-1])
    else:
        parts = _dirichlet(labels_N.numpy(), sizes, float(partition.partition(":")[2]), rng)
    places = np.empty(num, dtype=np.int64)
    for mine, part in zip(positions, parts, strict=True):
        # The first order is shuffled within a worker, too; that of a stretch only if the order begins so.
        places[mine] = part if shards is not None and not ORDERS[config.order].shuffle else rng.permutation(part)
    return torch.from_numpy(places)


def _dirichlet(
    labels_N: npt.NDArray[np.int64], sizes: list[int], alpha: float, rng: np.random.Generator
) -> list[npt.NDArray[np.int64]]:
    """Every worker draws its own mixture of classes; where a class has run out, the others make up for it."""
    classes = np.unique(labels_N)
    pools = [rng.permutation(np.flatnonzero(labels_N == label)) for label in classes]
    left = np.array([len(pool) for pool in pools])
    shards = []
    for size in sizes:
        mixture = rng.dirichlet(np.full(len(classes), alpha))
        taken = np.zeros(len(classes), dtype=np.int64)
        while (missing := size - int(taken.sum())) > 0:
            weights = np.where(left > taken, mixture, 0.0)
            if weights.sum() == 0:  # none of the classes it wanted is left
                weights = (left - taken).astype(float)
            drawn = rng.multinomial(missing, weights / weights.sum())
            taken = np.minimum(taken + drawn, left)
        shards.append(
            np.concatenate(
                [pool[len(pool) - n : len(pool) - n + k] for pool, n, k in zip(pools, left, taken, strict=True)]
            )
        )
        left = left - taken
    return shards

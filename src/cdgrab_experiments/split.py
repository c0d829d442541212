"""Which worker gets which example: evenly, or as unlike each other as one wishes.

An `Ordering` deals positions to workers; here it is decided which example lies at which position. So every order, rule
and exchange works on every split.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cdgrab import Ordering
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


def placed(config: RunConfig, labels_N: Tensor | None, num: int) -> Tensor:
    """The example at every position.

    Args:
        config: Of the run: its partition, order, workers and seed.
        labels_N: The class of every example.
        num: Number of examples.
    """
    check_partition(config.partition)
    if config.partition == "iid":
        return torch.arange(num)
    if labels_N is None:
        raise ValueError(f"partition {config.partition!r} needs classes, which this task has none of; use iid")
    workers, seed, partition = config.workers, config.seed, config.partition
    # Real ranks are dealt the same positions, but see only their own.
    dealt = Ordering(num, batch_size=workers, unit_size=1, order=config.order, lanes=workers, seed=seed)
    positions = [order.numpy() for order in dealt.orders]
    rng = np.random.default_rng([seed, 0x5B117])
    sizes = [len(mine) for mine in positions]
    if partition == "sorted":
        shards = np.split(np.argsort(labels_N.numpy(), kind="stable"), np.cumsum(sizes)[:-1])
    else:
        shards = _dirichlet(labels_N.numpy(), sizes, float(partition.partition(":")[2]), rng)
    places = np.empty(num, dtype=np.int64)
    for mine, shard in zip(positions, shards, strict=True):
        places[mine] = rng.permutation(shard)  # the first order is shuffled within a worker, too
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

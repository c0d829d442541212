"""One data set, dealt to workers in more or less uneven ways.

All splits hold the same units, so the function to be minimised and its minimum are the same; only who has what differs.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cdgrab_experiments.theory.seeds import generator

IntArray = npt.NDArray[np.int64]


def clusters(seeds: int, num_units: int, classes: int, features: int) -> tuple[Tensor, Tensor]:
    """Overlapping Gaussian clusters, as many points in each: inputs `S x N x F` and labels `S x N`."""
    rng = torch.Generator().manual_seed(features)
    labels_N = torch.arange(num_units) % classes
    centres_SCF = torch.randn(seeds, classes, features, generator=rng, dtype=torch.float64)
    noise_SNF = torch.randn(seeds, num_units, features, generator=rng, dtype=torch.float64)
    return centres_SCF[:, labels_N] + noise_SNF, labels_N.repeat(seeds, 1)


def split(labels_N: npt.NDArray[np.int64], workers: int, concentration: float, seed: int) -> IntArray:
    """Deal all units to workers, as many to each, and give their order, worker by worker.

    Every worker draws shares of the labels from a Dirichlet law and fills up accordingly from what is left; within a
    worker units are in random order.

    Args:
        labels_N: The label of every unit.
        workers: How many workers; they must divide the number of units.
        concentration: Of the Dirichlet law, per label. Infinity deals at random, 0 sorts by label.
        seed: Seed of everything random.
    """
    rng = generator(seed, "split")
    num_units, per_worker = len(labels_N), len(labels_N) // workers
    shuffled = rng.permutation(num_units)
    if math.isinf(concentration):
        return shuffled
    if concentration == 0:
        by_label = shuffled[np.argsort(labels_N[shuffled], kind="stable")].reshape(workers, per_worker)
        return np.concatenate([rng.permutation(mine) for mine in by_label])
    classes = int(labels_N.max()) + 1
    pools = [list(shuffled[labels_N[shuffled] == label]) for label in range(classes)]
    dealt = []
    for _ in range(workers):
        shares_C = rng.dirichlet(np.full(classes, concentration))
        mine: list[int] = []
        while len(mine) < per_worker:
            left_C = np.array([float(bool(pool)) for pool in pools]) * (shares_C + 1e-12)
            mine.append(pools[rng.choice(classes, p=left_C / left_C.sum())].pop())
        dealt.append(rng.permutation(mine))
    return np.concatenate(dealt)

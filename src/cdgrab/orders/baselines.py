"""Orders that look at no gradient: pure functions of (number of units, seed, epoch, worker).

In epoch 0 each of them is the order in which the units were dealt, which is already shuffled (or, for
`sequential`, the order of the dataset), so that every run starts where `DistributedSampler` starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cdgrab.lanes import IntArray, generator

Baseline = Callable[[int, int, int, int], IntArray]


def fixed(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:  # noqa: ARG001
    """The dealt order in every epoch: `shuffle-once`, `sequential`, and `global-rr`, which deals anew instead."""
    return np.arange(num_units)


def reshuffled(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:
    """A fresh permutation each epoch, another one on every worker (D-RR)."""
    if epoch == 0:
        return np.arange(num_units)
    return generator(seed, epoch, worker, "reshuffle").permutation(num_units)


def flip_flop(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:
    """A fresh permutation every second epoch, and its reverse in between (Rajput et al., 2022)."""
    forward = reshuffled(num_units, seed, epoch - epoch % 2, worker)
    return forward[::-1].copy() if epoch % 2 else forward


def block_reversal(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:
    """Block reshuffling with paired reversal (Nguyen, Phan and Kalagnanam, arXiv 2604.00260).

    The units are cut once into about `sqrt(num_units)` blocks; every second epoch the blocks are visited in a fresh
    random order, each block inside in a fresh random order, and the epoch in between runs the same order backwards.
    This is our reading of the paper's two components. It chooses blocks adaptively; here their number is the square
    root of that of the units, which balances how many there are to permute with how much each of them averages.
    """
    rng = generator(seed, epoch - epoch % 2, worker, "block")
    blocks = np.array_split(np.arange(num_units), max(1, math.isqrt(num_units)))
    if epoch >= 2:
        blocks = [rng.permutation(blocks[i]) for i in rng.permutation(len(blocks))]
    forward = np.concatenate(blocks)
    return forward[::-1].copy() if epoch % 2 else forward

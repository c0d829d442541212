"""Orders without gradients: pure functions of (number of units, seed, epoch, worker).

In epoch 0 each returns the order in which the units were dealt, so that every run starts as with `DistributedSampler`.
That order is already shuffled; for `sequential` it is the order of the dataset.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cdgrab.lanes import IntArray, generator

Baseline = Callable[[int, int, int, int], IntArray]


def fixed(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:  # noqa: ARG001
    """The dealt order in every epoch: `shuffle-once`, `sequential`, and `global-rr`, which deals again instead."""
    return np.arange(num_units)


def reshuffled(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:
    """A fresh permutation in each epoch, different on every worker (D-RR)."""
    if epoch == 0:
        return np.arange(num_units)
    return generator(seed, epoch, worker, "reshuffle").permutation(num_units)


def reshuffled_together(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:  # noqa: ARG001
    """A fresh permutation in each epoch, the same on every worker, so that the units of a step stay together.

    That is what D-RR is where all processes draw from one seed. A worker with one unit more than another has the same
    order otherwise.
    """
    if epoch == 0:
        return np.arange(num_units)
    return np.argsort(generator(seed, epoch, "together").random(num_units), kind="stable")


def all_plus(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:  # noqa: ARG001
    """What balancing does if every sign is plus: even places in order, then odd places reversed, in every epoch.

    No gradient and no chance is in it, beyond the order of epoch 0. A unit without a partner goes to the middle.
    """
    pairs = num_units // 2
    places = np.arange(2 * pairs)
    alone = np.arange(2 * pairs, num_units)
    riffle = np.concatenate([places[::2], alone, places[1::2][::-1]])
    order = np.arange(num_units)
    while epoch:  # the power of a permutation, by squaring
        if epoch % 2:
            order = order[riffle]
        riffle, epoch = riffle[riffle], epoch // 2
    return order


def flip_flop(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:
    """A fresh permutation every second epoch, and its reverse in between (Rajput et al., 2022)."""
    forward = reshuffled(num_units, seed, epoch - epoch % 2, worker)
    return forward[::-1].copy() if epoch % 2 else forward


def block_reversal(num_units: int, seed: int, epoch: int, worker: int) -> IntArray:
    """Block reshuffling with paired reversal (Nguyen, Phan and Kalagnanam, arXiv 2604.00260).

    The units are cut once into about `sqrt(num_units)` blocks. Every second epoch visits the blocks in a fresh random
    order, and the units of a block in a fresh random order. The epoch after it runs the same order backwards.
    This is our reading of the paper's two components. The paper chooses blocks adaptively. The square root is a
    compromise: more blocks permute more, larger blocks average more.
    """
    rng = generator(seed, epoch - epoch % 2, worker, "block")
    blocks = np.array_split(np.arange(num_units), max(1, math.isqrt(num_units)))
    if epoch >= 2:
        blocks = [rng.permutation(blocks[i]) for i in rng.permutation(len(blocks))]
    forward = np.concatenate(blocks)
    return forward[::-1].copy() if epoch % 2 else forward

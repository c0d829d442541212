"""The descent of many runs at once, seeds times step sizes along one leading axis.

Every worker gives the gradient of one unit per turn; all step together with the mean, as under DDP.

Shapes: `G` step sizes, `S` seeds, `B = G * S` runs, `W` workers, `U` units each, `D` parameters, `M` looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cdgrab_experiments.theory.fits import Array
from cdgrab_experiments.theory.optimisers import OptimiserMaker, Sgd
from cdgrab_experiments.theory.orders import Orders

# Gradients of an epoch are kept until it is over; this many numbers at a time, and the runs are split accordingly.
_NUMBERS = 1 << 25

Parts = tuple[Tensor, ...]


class Problem(Protocol):
    """A sum over units, once for every seed. `N = W * U` units; unit `j` of worker `w` is `w * U + j`."""

    num_units: int

    def start(self) -> Tensor:
        """Where to begin: `S x D`."""

    def take(self, index: Tensor) -> Parts:
        """The data of units; `index` counts through all seeds' units, `seed * N + unit`, and may have any shape."""

    def rows(self, theta_BD: Tensor, parts: Parts) -> Tensor:
        """Gradients of the units taken (`B x W`), each at its run's parameters: `B x W x D`."""

    def error(self, theta_GSD: Tensor) -> Tensor:
        """How far from the goal: `G x S`."""


def descend(
    problem: Problem,
    order: str,
    *,
    workers: int,
    steps: Sequence[float],
    looks: Sequence[int],
    make_optimiser: OptimiserMaker = Sgd,
    tell: Callable[[], None] = lambda: None,
) -> Array:
    """Descend with every step size from every seed, and look at the errors.

    Args:
        problem: What is minimised.
        order: A name in `cdgrab.ORDERS`, or `with-replacement`.
        workers: How many workers share the units.
        steps: Step sizes per epoch; a single step is this over the units of a worker.
        looks: After how many epochs to look, increasing; the last is where the run ends.
        make_optimiser: Makes the optimiser from the runs' step sizes.
        tell: Called after every epoch.

    Returns:
        Errors, `G x S x M`. A run that has diverged shows what it shows: infinity, NaN, or a large number.
    """
    start_SD = problem.start()
    units = problem.num_units // workers
    row_numbers = problem.num_units * start_SD.numel()  # of all seeds with one step size
    at_once = max(1, _NUMBERS // row_numbers)
    parts = [
        _descend(problem, order, start_SD, workers, units, steps[first : first + at_once], looks, make_optimiser, tell)
        for first in range(0, len(steps), at_once)
    ]
    return np.concatenate(parts)


def epochs_told(steps: Sequence[float], dim: int, seeds: int, num_units: int, epochs: int) -> int:
    """How often `descend` will call `tell`."""
    return -(-len(steps) // max(1, _NUMBERS // (num_units * seeds * dim))) * epochs


def _descend(
    problem: Problem,
    order: str,
    start_SD: Tensor,
    workers: int,
    units: int,
    steps: Sequence[float],
    looks: Sequence[int],
    make_optimiser: OptimiserMaker,
    tell: Callable[[], None],
) -> Array:
    seeds, dim = start_SD.shape
    runs = len(steps) * seeds
    seeds_B = np.tile(np.arange(seeds), len(steps))
    steps_B = torch.tensor(steps, dtype=start_SD.dtype).repeat_interleave(seeds) / units
    theta_BD = start_SD.repeat(len(steps), 1)
    orders = Orders(order, seeds_B, workers, units)
    optimiser = make_optimiser(steps_B)
    kept_UBWD = torch.empty(units, runs, workers, dim, dtype=theta_BD.dtype) if orders.balanced else None
    first_BW1 = torch.from_numpy(seeds_B[:, None] * problem.num_units + np.arange(workers) * units)[..., None]
    errors = []
    for epoch in range(looks[-1] + 1):
        if epoch in looks:
            errors.append(problem.error(theta_BD.view(len(steps), seeds, dim)).double().numpy())
        if epoch == looks[-1]:
            break
        index_UBW = (torch.from_numpy(orders.epoch(epoch)) + first_BW1).permute(2, 0, 1)
        for turn, parts in enumerate(zip(*problem.take(index_UBW), strict=True)):
            rows_BWD = problem.rows(theta_BD, parts)
            if kept_UBWD is not None:
                kept_UBWD[turn] = rows_BWD
            optimiser.step(theta_BD, rows_BWD.mean(1))
        if kept_UBWD is not None:
            # A step size may be too large for its problem: that is for the errors to show, not for warnings.
            with np.errstate(over="ignore", invalid="ignore"):
                orders.observe(kept_UBWD)
        tell()
    return np.stack(errors, axis=-1)

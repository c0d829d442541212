"""Orders of many runs at once: the library's own, run by run.

The descent is computed for all runs together; each of them has an `Ordering` of its own, so that what is verified here
is what users get. Runs of one seed see the same random orders, whatever their step size: differences
between step sizes are then not differences of luck.

Shapes: `B` runs, `W` workers, `U` units each, `D` dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cdgrab import ORDERS, Ordering
from cdgrab_experiments.theory.seeds import generator

IntArray = npt.NDArray[np.int64]

WITH_REPLACEMENT = "with-replacement"


class Orders:
    """The orders of `B` runs.

    Args:
        order: A name in `cdgrab.ORDERS`, or `with-replacement`, which is no order: units are drawn independently.
        seeds_B: Seed of everything random in a run.
        workers: Number of workers.
        units: Units of each.
    """

    def __init__(self, order: str, seeds_B: npt.NDArray[np.int64], workers: int, units: int) -> None:
        self._seeds_B, self._workers, self._units = seeds_B, workers, units
        self.balanced = order != WITH_REPLACEMENT and ORDERS[order].needs_gradients
        # Runs of one seed have the same random orders, and each its own balanced ones.
        seeds: Any = [] if order == WITH_REPLACEMENT else seeds_B if self.balanced else np.unique(seeds_B)
        self._orderings = [
            Ordering(workers * units, batch_size=workers, unit_size=1, lanes=workers, order=order, seed=int(seed))
            for seed in seeds
        ]
        self._numbers = [_numbered(ordering) for ordering in self._orderings]
        self._of_run_B = np.arange(len(seeds_B)) if self.balanced else np.searchsorted(np.unique(seeds_B), seeds_B)

    def epoch(self, epoch: int) -> IntArray:
        """What to visit in this epoch: `B x W x U`."""
        if not self._orderings:
            return np.stack([self._drawn(int(seed), epoch) for seed in self._seeds_B])
        found = []
        for ordering, number_N in zip(self._orderings, self._numbers, strict=True):
            ordering.set_epoch(epoch)
            found.append(number_N[torch.stack(ordering.orders).numpy()])
        return np.stack(found)[self._of_run_B]

    def observe(self, rows_UBWD: Tensor) -> None:
        """The gradients of the whole epoch, in the order visited: they decide the next one."""
        for b, ordering in enumerate(self._orderings):
            ordering.observe(rows_UBWD[:, b])

    def _drawn(self, seed: int, epoch: int) -> IntArray:
        return generator(seed, epoch, WITH_REPLACEMENT).integers(self._units, size=(self._workers, self._units))


def _numbered(ordering: Ordering) -> IntArray:
    """For every dataset index its number within its lane: the place in the order of the first epoch."""
    first_WU = torch.stack(ordering.orders).numpy()
    number_N = np.empty(first_WU.size, dtype=np.int64)
    number_N[first_WU] = np.arange(first_WU.shape[1])
    return number_N

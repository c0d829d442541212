"""Orders of many runs at once: the library's own, run by run.

The descent is computed for all runs together; balancing is the library's sorter for each of them, so that what is
verified here is what users get. Runs of one seed see the same random orders, whatever their step size: differences
between step sizes are then not differences of luck.

Shapes: `B` runs, `W` workers, `U` units each, `D` dimensions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cdgrab.balancing.rules import find_rule
from cdgrab.balancing.sorter import make_sorter
from cdgrab.lanes import IntArray, generator
from cdgrab.orders import Free, find_order

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
        self._spec = None if order == WITH_REPLACEMENT else find_order(order)
        self._sorters = []
        if self._spec is not None and not isinstance(self._spec, Free):
            for seed in seeds_B.tolist():
                rngs = [generator(seed, worker, "rule") for worker in range(workers)]
                self._sorters.append(make_sorter(self._spec, rngs, find_rule("greedy")))
        self._current = [[np.arange(units) for _ in range(workers)] for _ in seeds_B]

    @property
    def balanced(self) -> bool:
        """Whether `observe` wants gradients."""
        return bool(self._sorters)

    def epoch(self, epoch: int) -> IntArray:
        """What to visit in this epoch: `B x W x U`."""
        if self._sorters:
            return np.array(self._current)
        drawn = {seed: self._draw(seed, epoch) for seed in set(self._seeds_B.tolist())}
        return np.stack([drawn[seed] for seed in self._seeds_B.tolist()])

    def observe(self, epoch: int, rows_UBWD: Tensor) -> None:
        """The gradients of the whole epoch, in the order visited: they decide the next one."""
        for b, sorter in enumerate(self._sorters):
            sorter.start_epoch(epoch, np.full(self._workers, self._units))
            sorter.add(rows_UBWD[:, b])
            sorter.close()
            nothing = np.arange(0)
            self._current[b] = [sorter.arrange(w, visited, nothing) for w, visited in enumerate(self._current[b])]

    def _draw(self, seed: int, epoch: int) -> IntArray:
        if isinstance(self._spec, Free):
            return np.stack([self._spec.baseline(self._units, seed, epoch, worker) for worker in range(self._workers)])
        return generator(seed, epoch, WITH_REPLACEMENT).integers(self._units, size=(self._workers, self._units))

"""Balance fixed vectors round after round, and note the herding bound after each.

`cdgrab.balance_vectors` gives the last order only; calling it once per number of rounds would repeat the earlier ones.
This is the same loop around the same sorter (a test holds the two equal) with a look at the bound in between.

Shapes: `W` workers, `U` units each, `D` dimensions. Vectors are kept turn by turn, `U x W x D`, in the order visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdgrab.balancing.rules import find_rule
from cdgrab.balancing.sorter import make_sorter
from cdgrab.lanes import IntArray, generator
from cdgrab.orders import Free, find_order

Shift = Callable[[int], Tensor]


@dataclass(frozen=True)
class Round:
    """After a round.

    Attributes:
        bound: The herding bound of the order found.
        orders_WU: That order.
    """

    bound: float
    orders_WU: IntArray


def balance_rounds(
    vectors_WUD: Tensor, order: str, rule: str, rounds: int, seed: int, shift: Shift | None = None
) -> Iterator[Round]:
    """Yield the order before the first round, then the one after each.

    Args:
        vectors_WUD: What is balanced.
        order: A name in `cdgrab.ORDERS`.
        rule: A name in `cdgrab.RULES`.
        rounds: How many rounds.
        seed: Seed of everything random.
        shift: What to add to all vectors in a round: a mean that moves, as that of gradients does. It changes no bound.
    """
    num_workers, num_units, dim = vectors_WUD.shape
    flat_ND = vectors_WUD.reshape(-1, dim)
    mean_D = flat_ND.sum(0, dtype=torch.float64) / len(flat_ND)
    first_W = np.arange(num_workers) * num_units
    orders = [np.arange(num_units) for _ in range(num_workers)]
    visited_UWD = torch.empty(num_units, num_workers, dim, dtype=flat_ND.dtype).copy_(vectors_WUD.transpose(0, 1))
    yield Round(_bound(visited_UWD, mean_D), np.stack(orders))

    spec = find_order(order)
    rngs = [generator(seed, worker, "rule") for worker in range(num_workers)]
    sorter = None if isinstance(spec, Free) else make_sorter(spec, rngs, find_rule(rule))
    for epoch in range(rounds):
        if isinstance(spec, Free):
            orders = [spec.baseline(num_units, seed, epoch + 1, worker) for worker in range(num_workers)]
        else:
            assert sorter is not None
            sorter.start_epoch(epoch, np.full(num_workers, num_units))
            moved_UWD = visited_UWD if shift is None else visited_UWD + shift(epoch)
            for rows_mWD in moved_UWD.split(1024):
                sorter.add(rows_mWD)
            sorter.close()
            orders = [sorter.arrange(worker, visited, np.arange(0)) for worker, visited in enumerate(orders)]
        turns_UW = torch.from_numpy(np.stack(orders, axis=1) + first_W)
        # Into the same memory: the sorter keeps no row, and fresh pages cost as much as filling them.
        torch.index_select(flat_ND, 0, turns_UW.reshape(-1), out=visited_UWD.view(-1, dim))
        yield Round(_bound(visited_UWD, mean_D), np.stack(orders))


def _bound(visited_UWD: Tensor, mean_D: Tensor) -> float:
    """The largest coordinate of any prefix sum.

    The few vectors of a turn are added up as they are, the many turns in double precision.
    """
    steps_DU = visited_UWD.sum(1).T.double() - visited_UWD.shape[1] * mean_D[:, None]
    return float(steps_DU.cumsum(1).abs().max())

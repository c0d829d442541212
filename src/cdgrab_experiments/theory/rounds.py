"""Balance fixed vectors round after round, and note the herding bound after each.

Shapes: `W` workers, `U` units each, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import cdgrab

IntArray = npt.NDArray[np.int64]
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
    mean_D = vectors_WUD.sum((0, 1), dtype=torch.float64) / vectors_WUD.shape[:2].numel()
    workers = torch.arange(len(vectors_WUD))
    found = cdgrab.balance_rounds(vectors_WUD, order=order, rule=rule, rounds=rounds, seed=seed, shift=shift)
    for orders_WU in found:
        yield Round(_bound(vectors_WUD[workers, orders_WU.T], mean_D), orders_WU.numpy())


def _bound(visited_UWD: Tensor, mean_D: Tensor) -> float:
    """The largest coordinate of any prefix sum.

    The few vectors of a visit are added up as they are, the many visits in double precision.
    """
    steps_DU = visited_UWD.sum(1).T.double() - visited_UWD.shape[1] * mean_D[:, None]
    return float(steps_DU.cumsum(1).abs().max())

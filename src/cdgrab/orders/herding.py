"""Herding: how balanced an order is, and the greedy order on stored vectors.

Shapes: `W` workers, `U` units each, `D` dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cdgrab.lanes import IntArray


def herding_bound(vectors_WUD: Tensor, orders_WU: Tensor | None = None, *, ord: float = float("inf")) -> float:
    """The norm of the largest prefix sum of centred vectors, which a good order keeps small.

    `max over t of || sum over j <= t, over w, of (z[w, order[w, j]] - mean) ||`, with the mean of all vectors.

    Args:
        vectors_WUD: Vectors of every worker's units.
        orders_WU: The order in which each worker visits its units; by default that of `vectors_WUD`.
        ord: The norm; the paper uses the largest coordinate.
    """
    mean_D = vectors_WUD.mean((0, 1))
    if orders_WU is not None:
        index = orders_WU.to(vectors_WUD.device)[..., None].expand_as(vectors_WUD)
        vectors_WUD = vectors_WUD.gather(1, index)
    prefix_UD = (vectors_WUD.sum(0) - len(vectors_WUD) * mean_D).cumsum(0)
    return float(torch.linalg.vector_norm(prefix_UD, ord=ord, dim=1).max())


def greedy_herding(vectors: list[Tensor]) -> list[IntArray]:
    """Take, visit by visit and lane by lane, the unit that brings the sum of centred vectors closest to zero.

    Costs `O(U^2 D)` per worker. A vector that is not finite is left out.

    Args:
        vectors: A `units x dim` tensor for every worker.

    Returns:
        For every worker the positions of its vectors in herded order.
    """
    finite = [np.flatnonzero(torch.isfinite((rows * rows).sum(1)).cpu().numpy()) for rows in vectors]
    kept = [rows[torch.from_numpy(index).to(rows.device)] for rows, index in zip(vectors, finite, strict=True)]
    centred = [rows - rows.mean(0) if len(rows) else rows for rows in kept]
    lengths = [(rows * rows).sum(1) for rows in centred]
    order: list[list[int]] = [[] for _ in vectors]
    taken = [torch.zeros(len(rows), dtype=torch.bool, device=rows.device) for rows in centred]
    prefix_D = next((torch.zeros_like(rows[0]) for rows in centred if len(rows)), torch.zeros(0))
    for visit in range(max(map(len, centred), default=0)):
        for worker, rows in enumerate(centred):
            if visit < len(rows):
                growth = torch.nan_to_num(lengths[worker] + 2 * rows @ prefix_D)
                best = int(growth.masked_fill(taken[worker], torch.inf).argmin())
                prefix_D += rows[best]
                taken[worker][best] = True
                order[worker].append(best)
    return [index[np.array(chosen, dtype=np.int64)] for index, chosen in zip(finite, order, strict=True)]

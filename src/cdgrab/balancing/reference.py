"""The paper's loops, one vector at a time: slow and obvious. Tests compare every fast version with them.

Notation of Cooper et al. (NeurIPS 2023): `g[w, j]` is the gradient of the unit worker `w` visits in turn `j`, `r` the
running sum, `s` the inner product that decides a sign. W workers, U units each, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

SignOf = Callable[[float, float], int]


def greedy(s: float, b2: float) -> int:  # noqa: ARG001
    """`+1` if adding the row does not lengthen the running sum more than subtracting it."""
    return 1 if s <= 0 else -1


def walk(c: float, draws: Iterator[float]) -> SignOf:
    """`+1` with probability `1/2 - s / (2c)`; `draws` are uniform in [0, 1)."""

    def sign_of(s: float, b2: float) -> int:  # noqa: ARG001
        probability = min(1.0, max(0.0, 0.5 - s / (2 * c)))
        return 1 if next(draws) <= probability else -1

    return sign_of


def halving(*, delta: float, epochs: int, epoch: int, num_rows: int, draws: Iterator[float]) -> SignOf:
    """Kernel halving; `epoch` counts from 1, `draws` are uniform in [-1, 1)."""
    v, k = 0.0, 0

    def sign_of(s: float, b2: float) -> int:
        nonlocal v, k
        k += 1
        lam = math.log((4 / delta) * (1 + math.log(epochs)) * (1 + math.log(num_rows)) * k * epoch)
        a = max(b2, math.sqrt(b2 * v * lam))
        if a > 0:
            v = 2 * b2 if a == b2 else v + b2 * max(0.0, 2 + (b2 - 2 * a) * v / a**2)
        return 1 if s <= next(draws) * a else -1

    return sign_of


def pair_balance(g_WUD: Tensor, sign_of: SignOf = greedy) -> tuple[Tensor, Tensor]:
    """One epoch of PairBalance with one running sum for all workers.

    Returns:
        `next_WU`: for every worker, which turn of this epoch fills each slot of the next one. `signs_WU`: the sign
        of every unit, 0 for one without a partner.
    """
    W, U, D = g_WUD.shape
    r = torch.zeros(D, dtype=g_WUD.dtype)
    signs_WU = torch.zeros(W, U, dtype=torch.int64)
    next_WU = torch.full((W, U), U // 2)  # an unpaired last unit stays in the middle slot
    next_WU[:, U // 2] = U - 1
    for k in range(U // 2):
        for w in range(W):
            diff = g_WUD[w, 2 * k] - g_WUD[w, 2 * k + 1]
            sign = sign_of(float(r @ diff), float(diff @ diff))
            r += sign * diff
            signs_WU[w, 2 * k], signs_WU[w, 2 * k + 1] = sign, -sign
            first, second = (2 * k, 2 * k + 1) if sign > 0 else (2 * k + 1, 2 * k)
            next_WU[w, k] = first
            next_WU[w, U - 1 - k] = second
    return next_WU, signs_WU


def mean_balance(g_WUD: Tensor, mean_WD: Tensor, sign_of: SignOf = greedy) -> tuple[Tensor, Tensor]:
    """One epoch of MeanBalance (GraB) with one running sum; `mean_WD` is last epoch's mean, zero in the first.

    Returns:
        The same as `pair_balance`.
    """
    W, U, D = g_WUD.shape
    r = torch.zeros(D, dtype=g_WUD.dtype)
    signs_WU = torch.zeros(W, U, dtype=torch.int64)
    for j in range(U):
        for w in range(W):
            c = g_WUD[w, j] - mean_WD[w]
            sign = sign_of(float(r @ c), float(c @ c))
            r += sign * c
            signs_WU[w, j] = sign
    next_WU = torch.empty(W, U, dtype=torch.int64)
    for w in range(W):
        front = [j for j in range(U) if signs_WU[w, j] > 0]
        back = [j for j in range(U) if signs_WU[w, j] < 0]
        next_WU[w] = torch.tensor(front + back[::-1])
    return next_WU, signs_WU

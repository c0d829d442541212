"""Gradients of windows and their mean, compiled for the CPU, when numba is installed (`pip install "cdgrab[fast]"`).

PyTorch forms the gradients of a batch, joins them to rows and reads them for their mean. Here a row is written once,
and added to the mean while it is in cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cdgrab.balance.compiled import REORDER

STEPS = 6  # written out below, for that is what makes it fast


def write_rows(layers: list[tuple[Tensor, Tensor]], rows_ND: Tensor, mean_D: Tensor) -> None:
    """Write what every window adds to the gradient, and its mean.

    Args:
        layers: For every layer its inputs and output gradients, `6 x N x p` and `6 x N x q`, contiguous.
        rows_ND: For every layer `q x p` weights and `q` biases.
        mean_D: Of the rows.
    """
    mean_D.zero_()
    inputs, grads = zip(*((a.numpy(), b.numpy()) for a, b in layers), strict=True)
    _kernel()(inputs, grads, rows_ND.numpy(), mean_D.numpy())


@functools.cache
def _kernel() -> Callable[..., None]:
    import numba

    compiled: Any = numba.njit(nogil=True, fastmath=REORDER)

    @compiled
    def layer(a, b, n, row):  # type: ignore[no-untyped-def]
        p, q = a.shape[2], b.shape[2]
        a0, a1, a2, a3, a4, a5 = a[0, n], a[1, n], a[2, n], a[3, n], a[4, n], a[5, n]
        for o in range(q):
            b0, b1, b2, b3, b4, b5 = b[0, n, o], b[1, n, o], b[2, n, o], b[3, n, o], b[4, n, o], b[5, n, o]
            weights = row[o * p : (o + 1) * p]
            for i in range(p):
                weights[i] = b0 * a0[i] + b1 * a1[i] + b2 * a2[i] + b3 * a3[i] + b4 * a4[i] + b5 * a5[i]
            row[q * p + o] = b0 + b1 + b2 + b3 + b4 + b5

    @compiled
    def kernel(inputs, grads, rows, mean):  # type: ignore[no-untyped-def]
        num, dim = rows.shape
        share = rows.dtype.type(1.0 / num)
        for n in range(num):
            row, start = rows[n], 0
            for number in range(len(inputs)):
                a, b = inputs[number], grads[number]
                size = (a.shape[2] + 1) * b.shape[2]
                layer(a, b, n, row[start : start + size])
                start += size
            for i in range(dim):
                mean[i] += share * row[i]

    found: Callable[..., None] = kernel
    return found

"""Gradients of windows and their mean, compiled for the CPU, when numba is installed (`pip install "cdgrab[fast]"`).

PyTorch forms the gradients of a batch, joins them to rows and reads them for their mean. Here a row is written once,
from what the passes have left where they left it, and added to the mean while it is in cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cdgrab_experiments.compiled import REORDER

STEPS = 6  # written out below, for that is what makes it fast


def write_rows(passed: tuple[Tensor, ...], rows_ND: Tensor, mean_D: Tensor) -> None:
    """Write what every window adds to the gradient, and its mean.

    Args:
        passed: What two passes have left, contiguous: the values that windows have seen, `N x (p + 6)`; outputs of two
            hidden layers, `6 x N x h`, and gradients of the same; gradients of the predictions, `N x 6`.
        rows_ND: For every layer its weights, `outputs x inputs`, and its biases.
        mean_D: Of the rows.
    """
    _kernel()(*(part.numpy() for part in passed), rows_ND.numpy(), mean_D.numpy())


@functools.cache
def _kernel() -> Callable[..., None]:
    import numba

    compiled: Any = numba.njit(nogil=True, fastmath=REORDER)

    @compiled
    def of_window(x, n):  # type: ignore[no-untyped-def]
        return x[0, n], x[1, n], x[2, n], x[3, n], x[4, n], x[5, n]

    @compiled
    def layer(inputs, grads, part):  # type: ignore[no-untyped-def]
        a0, a1, a2, a3, a4, a5 = inputs
        b0, b1, b2, b3, b4, b5 = grads
        p, q = len(a0), len(b0)
        # Two outputs at a time, so that inputs are read half as often. A last one without a partner is written twice.
        for o in range(0, q, 2):
            n = min(o + 1, q - 1)
            c0, c1, c2, c3, c4, c5 = b0[o], b1[o], b2[o], b3[o], b4[o], b5[o]
            d0, d1, d2, d3, d4, d5 = b0[n], b1[n], b2[n], b3[n], b4[n], b5[n]
            weights, weights_next = part[o * p : (o + 1) * p], part[n * p : (n + 1) * p]
            for i in range(p):
                x0, x1, x2, x3, x4, x5 = a0[i], a1[i], a2[i], a3[i], a4[i], a5[i]
                weights[i] = c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3 + c4 * x4 + c5 * x5
                weights_next[i] = d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3 + d4 * x4 + d5 * x5
        biases = part[q * p :]
        for o in range(q):
            biases[o] = b0[o] + b1[o] + b2[o] + b3[o] + b4[o] + b5[o]

    @compiled
    def kernel(values, first, second, d_first, d_second, d_out, rows, mean):  # type: ignore[no-untyped-def]
        (num, dim), h = rows.shape, first.shape[2]
        p = values.shape[1] - STEPS
        end_first = (p + 1) * h
        end_second = end_first + (h + 1) * h
        share = rows.dtype.type(1.0 / num)
        for n in range(num):
            row, v, d = rows[n], values[n], d_out[n]
            seen = v[:p], v[1 : p + 1], v[2 : p + 2], v[3 : p + 3], v[4 : p + 4], v[5 : p + 5]
            layer(seen, of_window(d_first, n), row[:end_first])
            layer(of_window(first, n), of_window(d_second, n), row[end_first:end_second])
            layer(of_window(second, n), (d[:1], d[1:2], d[2:3], d[3:4], d[4:5], d[5:]), row[end_second:])
            # Two rows at a time, after a first one alone.
            if n == 0:
                for i in range(dim):
                    mean[i] = share * row[i]
            elif n % 2 == 0:
                before = rows[n - 1]
                for i in range(dim):
                    mean[i] += share * (before[i] + row[i])
            elif n == num - 1:
                for i in range(dim):
                    mean[i] += share * row[i]

    found: Callable[..., None] = kernel
    return found

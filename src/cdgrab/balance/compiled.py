"""The paper's loop compiled for the CPU, when numba is installed (`pip install "cdgrab[fast]"`).

Where one process has whole rows, the loop itself, free of the interpreter, beats any table on a CPU: a row is read
while it is still in cache, and no Gram matrix is formed. Slices of rows need the table, and it can be had in one pass
over memory. Without numba `blocked.py` gives the same signs up to rounding, more slowly. numba is imported
at first use, never by `import cdgrab`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cdgrab.balance.rules import FloatArray

Array = npt.NDArray[Any]


@functools.cache
def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def lengths(rows_KD: Array, minus_KD: Array | None = None) -> FloatArray:
    """Squared lengths of the rows `rows - minus`, with 0 for a row that is not finite."""
    with np.errstate(all="ignore"):
        differences_KD = rows_KD if minus_KD is None else rows_KD - minus_KD
        lengths_K = np.einsum("kd,kd->k", differences_KD, differences_KD).astype(np.float64)
    return np.where(np.isfinite(lengths_K), lengths_K, 0.0)


def row_signs(
    rows_KD: Array, minus_KD: Array | None, scratch_2D: Array, running_sum_D: Array, thresholds_K: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Decide the signs of the `K` rows `rows - minus` and add the signed rows to `running_sum_D`, in place.

    All arrays are contiguous. Without `minus_KD` one core does the work; with it, which is meant for long rows, as many
    as PyTorch is set to use, and `scratch_2D`, which must hold finite numbers, is overwritten with such.

    Returns:
        Signs, the inner products they were decided on, and squared lengths. A row whose squared length is not
        finite gets `+1` and is not added.
    """
    signs_K, s_K, lengths_K = np.empty((3, len(rows_KD)))
    with np.errstate(all="ignore"):
        if minus_KD is None:
            _block_kernel()(rows_KD, running_sum_D, thresholds_K, signs_K, s_K, lengths_K)
        else:
            kernel = _difference_kernel(_use_threads(torch.get_num_threads()))
            kernel(rows_KD, minus_KD, scratch_2D, running_sum_D, thresholds_K, signs_K, s_K, lengths_K)
    return signs_K, s_K, lengths_K


# Sums may be reordered (that is what makes them fast), but NaN must stay NaN: hence not all of numba's `fastmath`.
# Infinite or NaN is asked as `not x < inf`, because isfinite() is written as x - x, which reordering folds away.
_REORDER = {"reassoc", "contract", "nsz", "arcp"}


@functools.cache
def _block_kernel() -> Callable[..., None]:
    import numba

    @numba.njit(nogil=True, fastmath=_REORDER)
    def kernel(rows, running_sum, thresholds, signs, products, lengths):  # type: ignore[no-untyped-def]
        for k in range(rows.shape[0]):
            s = b2 = running_sum.dtype.type(0)
            for i in range(rows.shape[1]):
                s += running_sum[i] * rows[k, i]
                b2 += rows[k, i] * rows[k, i]
            products[k], lengths[k], signs[k] = s, b2, 1.0
            if not b2 < np.inf:
                continue
            sign = running_sum.dtype.type(1 if s <= thresholds[k] else -1)
            for i in range(rows.shape[1]):
                running_sum[i] += sign * rows[k, i]
            signs[k] = sign

    return kernel


@functools.cache
def _difference_kernel(parallel: bool) -> Callable[..., None]:
    import numba

    span = numba.prange if parallel else range

    @numba.njit(parallel=parallel, nogil=True, fastmath=_REORDER)
    def kernel(rows, minus, scratch, running_sum, thresholds, signs, products, lengths):  # type: ignore[no-untyped-def]
        """Two rows at a time, from their own small table, added while the next two are read.

        Memory is what limits long rows, and this spares it. `scratch` holds finite numbers before and after.
        """
        zero, one = running_sum.dtype.type(0), running_sum.dtype.type(1)
        dim, last = rows.shape[1], rows.shape[0] - 1
        sign = sign_other = zero  # nothing to be added yet
        for k in range(0, last + 1, 2):
            # A row without a partner is paired with nothing: itself times zero.
            other, factor = (k + 1, one) if k < last else (k, zero)
            s = s_other = b2 = b2_other = gram = zero
            for i in span(dim):
                r = running_sum[i] + sign * scratch[0, i] + sign_other * scratch[1, i]
                x = rows[k, i] - minus[k, i]
                y = factor * (rows[other, i] - minus[other, i])
                running_sum[i] = r
                scratch[0, i] = x
                scratch[1, i] = y
                s += r * x
                s_other += r * y
                b2 += x * x
                b2_other += y * y
                gram += x * y
            sign, sign_other = one, one
            if b2 < np.inf:
                sign = one if s <= thresholds[k] else -one
                if b2_other < np.inf:
                    s_other += sign * gram
            else:
                scratch[0, :] = zero
            if b2_other < np.inf:
                sign_other = one if s_other <= thresholds[other] else -one
            else:
                scratch[1, :] = zero
            products[other], lengths[other], signs[other] = s_other, b2_other, sign_other
            products[k], lengths[k], signs[k] = s, b2, sign
        for i in span(dim):
            running_sum[i] += sign * scratch[0, i] + sign_other * scratch[1, i]

    return kernel


def difference_table(first_KD: Array, second_KD: Array, running_sum_D: Array) -> FloatArray:
    """Put `first - second` in the place of `first`; the inner products of these rows with each other and with `r`.

    One pass over memory on one core: a stretch of columns is subtracted and multiplied while it is in cache.

    Returns:
        `K x (K + 1)`: the Gram matrix, and in the last column the inner products with the running sum.
    """
    table_KK1 = np.zeros((len(first_KD), len(first_KD) + 1))
    with np.errstate(all="ignore"):
        _table_kernel()(first_KD, second_KD, running_sum_D, table_KK1)
    return table_KK1


@functools.cache
def _table_kernel() -> Callable[..., None]:
    import numba

    @numba.njit(nogil=True, fastmath=_REORDER)
    def kernel(first, second, running_sum, table):  # type: ignore[no-untyped-def]
        zero = running_sum.dtype.type(0)
        num_rows, dim = first.shape
        for start in range(0, dim, 2048):
            stop = min(dim, start + 2048)
            for k in range(num_rows):
                mine, theirs = first[k, start:stop], second[k, start:stop]
                for i in range(stop - start):
                    mine[i] -= theirs[i]
            r = running_sum[start:stop]
            # Two rows against two at a time, so that what has been loaded is used twice. With an odd number of rows
            # the last stands for its missing partner too: its products are then found, and written, twice.
            for k in range(0, num_rows, 2):
                k_next = min(k + 1, num_rows - 1)
                x, x_next = first[k, start:stop], first[k_next, start:stop]
                s = s_next = zero
                for i in range(stop - start):
                    s += x[i] * r[i]
                    s_next += x_next[i] * r[i]
                table[k, num_rows] += s
                if k_next > k:
                    table[k_next, num_rows] += s_next
                for j in range(0, k + 1, 2):
                    j_next = min(j + 1, num_rows - 1)
                    y, y_next = first[j, start:stop], first[j_next, start:stop]
                    a = b = c = d = zero
                    for i in range(stop - start):
                        a += x[i] * y[i]
                        b += x[i] * y_next[i]
                        c += x_next[i] * y[i]
                        d += x_next[i] * y_next[i]
                    table[k, j] += a
                    if j_next > j:
                        table[k, j_next] += b
                    if k_next > k:
                        table[k_next, j] += c
                        if j_next > j:
                            table[k_next, j_next] += d
        for k in range(num_rows):
            for j in range(k):
                table[j, k] = table[k, j]

    return kernel


def _use_threads(count: int) -> bool:
    """Let numba use as many threads as PyTorch; whether that is more than one."""
    import numba

    count = min(count, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if count > 1:
        numba.set_num_threads(count)
    return count > 1

"""The paper's loop compiled for the CPU, when numba is installed (`pip install "cdgrab[fast]"`).

On a CPU the compiled loop beats any table if one process has whole rows: it reads a row while it is still in cache, and
forms no Gram matrix. Slices of rows need the table, which takes one pass over memory. Without numba `blocked.py` gives
the same signs up to rounding, more slowly. numba is imported at first use, never by `import cdgrab`.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cdgrab.balancing.rules import FloatArray

Array = npt.NDArray[Any]

ALL_CORES = 1 << 15  # rows from this length on use all cores


@functools.cache
def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def lengths(rows_KD: Array, minus_KD: Array | None = None) -> FloatArray:
    """The squared lengths of the rows `rows - minus`, 0 for a row that is not finite."""
    with np.errstate(all="ignore"):
        differences_KD = rows_KD if minus_KD is None else rows_KD - minus_KD
        lengths_K = np.einsum("kd,kd->k", differences_KD, differences_KD).astype(np.float64)
    return np.where(np.isfinite(lengths_K), lengths_K, 0.0)


def visit_signs(
    rows_pLD: torch.Tensor,
    minus_pLD: torch.Tensor,
    scratch_2D: Array,
    running_sum_D: Array,
    thresholds_K: FloatArray,
) -> FloatArray:
    """Decide the signs of the rows `rows - minus`, visit by visit, and add them to the running sum, in place.

    Rows of any stride are read in place. Long rows use as many cores as PyTorch is set to use. `scratch_2D` is
    overwritten; it must hold finite numbers before, and does so after.

    Returns:
        `4 x (p * L)`, as `tables.decide` does.
    """
    visits, lanes, dim = rows_pLD.shape
    decided_4K = np.zeros((4, visits * lanes))
    rows, minus = _laid_out(rows_pLD), _laid_out(minus_pLD)
    parallel = dim >= ALL_CORES and use_threads(torch.get_num_threads())
    with in_turn(parallel):
        _difference_kernel(parallel)(*rows, *minus, lanes, scratch_2D, running_sum_D, thresholds_K, decided_4K)
    return decided_4K


def _laid_out(rows_pLD: torch.Tensor) -> tuple[Array, int, int]:
    """The rows' memory as a flat array, and the strides from visit to visit and from lane to lane."""
    if rows_pLD.stride(-1) != 1:
        rows_pLD = rows_pLD.contiguous()
    (visits, lanes, dim), (visit, lane, _) = rows_pLD.shape, rows_pLD.stride()
    flat: Array = rows_pLD.as_strided(((visits - 1) * visit + (lanes - 1) * lane + dim,), (1,)).numpy()
    return flat, visit, lane


# Sums may be reordered, which makes them fast, but NaN must stay NaN: hence not all of numba's `fastmath`. Kernels test
# for infinite or NaN by `not x < inf`: numba writes isfinite() as x - x, which reordering folds away.
REORDER = {"reassoc", "contract", "nsz", "arcp"}


@functools.cache
def _difference_kernel(parallel: bool) -> Callable[..., None]:
    import numba

    span = numba.prange if parallel else range

    @numba.njit(parallel=parallel, nogil=True, fastmath=REORDER)
    def kernel(  # type: ignore[no-untyped-def]
        rows, rows_visit, rows_lane, minus, minus_visit, minus_lane, lanes, scratch, running_sum, thresholds, decided
    ):
        """Decide two rows of a visit at a time from their own small table; add them while reading the next two.

        Memory bandwidth limits long rows, and this saves passes. `scratch` holds finite numbers before and after. Rows
        of different visits never share a table: rounding must not depend on how many visits come in one call.
        """
        zero, one = running_sum.dtype.type(0), running_sum.dtype.type(1)
        dim, last = running_sum.shape[0], lanes - 1
        sign = sign_other = zero  # nothing to add yet
        for visit in range(decided.shape[1] // lanes):
            for lane in range(0, lanes, 2):
                # A row without a partner is paired with itself times zero.
                partner, factor = (lane + 1, one) if lane < last else (lane, zero)
                at, at_minus = visit * rows_visit, visit * minus_visit
                first, first_minus = at + lane * rows_lane, at_minus + lane * minus_lane
                second, second_minus = at + partner * rows_lane, at_minus + partner * minus_lane
                x_row, x_minus = rows[first : first + dim], minus[first_minus : first_minus + dim]
                y_row, y_minus = rows[second : second + dim], minus[second_minus : second_minus + dim]
                s = s_other = b2 = b2_other = gram = zero
                for i in span(dim):
                    r = running_sum[i] + sign * scratch[0, i] + sign_other * scratch[1, i]
                    x = x_row[i] - x_minus[i]
                    y = factor * (y_row[i] - y_minus[i])
                    running_sum[i] = r
                    scratch[0, i] = x
                    scratch[1, i] = y
                    s += r * x
                    s_other += r * y
                    b2 += x * x
                    b2_other += y * y
                    gram += x * y
                k, other = visit * lanes + lane, visit * lanes + partner
                first_counts, second_counts = b2 < np.inf, b2_other < np.inf
                sign = one if not first_counts or s <= thresholds[k] else -one
                if first_counts and second_counts:
                    s_other += sign * gram
                sign_other = one if not second_counts or s_other <= thresholds[other] else -one
                if not first_counts:
                    scratch[0, :] = zero
                if not second_counts:
                    scratch[1, :] = zero
                # The row comes after its partner: if it has none, `other` is `k`, and this overwrites it.
                decided[0, other], decided[0, k] = sign_other, sign
                decided[1, other], decided[1, k] = sign_other * second_counts, sign * first_counts
                decided[2, other], decided[2, k] = s_other if second_counts else zero, s if first_counts else zero
                decided[3, other], decided[3, k] = b2_other if second_counts else zero, b2 if first_counts else zero
        for i in span(dim):
            running_sum[i] += sign * scratch[0, i] + sign_other * scratch[1, i]

    return kernel


def difference_table(first_KD: Array, second_KD: Array, running_sum_D: Array) -> FloatArray:
    """Replace `first` by `first - second` in place, and return the table of these rows.

    One pass over memory on one core: some columns at a time are subtracted and multiplied while in cache.

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

    @numba.njit(nogil=True, fastmath=REORDER)
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
            # Two rows against two at a time, so that every loaded number is used twice. With an odd number of rows the
            # last is its own partner: its products are computed twice and written once.
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


_PARALLEL = threading.Lock()


def in_turn(parallel: bool) -> AbstractContextManager[Any]:
    """A lock for kernels on several cores: numba's simplest thread pool aborts if two run at once."""
    return _PARALLEL if parallel else nullcontext()


def use_threads(count: int) -> bool:
    """Let numba use as many threads as PyTorch. Returns whether that is more than one."""
    import numba

    count = min(count, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if count > 1:
        numba.set_num_threads(count)
    return count > 1

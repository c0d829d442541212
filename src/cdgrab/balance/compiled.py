"""The paper's loop compiled for the CPU, when numba is installed (`pip install "cdgrab[fast]"`).

On a CPU the loop itself, free of the interpreter, beats any table: a row is read while it is still in cache, and no
Gram matrix is formed. Without numba `blocked.py` gives the same signs up to rounding, more slowly. numba is imported
at first use, never by `import cdgrab`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cdgrab.balance.rules import FloatArray

# Above this many dimensions a row is worth sharing between cores.
_PARALLEL_DIM = 1 << 18


@functools.cache
def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def lengths(rows_KD: npt.NDArray[Any]) -> FloatArray:
    """Squared lengths of the rows, with 0 for a row that is not finite."""
    lengths_K = np.einsum("kd,kd->k", rows_KD, rows_KD).astype(np.float64)
    return np.where(np.isfinite(lengths_K), lengths_K, 0.0)


def row_signs(
    rows_KD: npt.NDArray[Any], running_sum_D: npt.NDArray[Any], thresholds_K: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Decide the signs of `K` rows and add the signed rows to `running_sum_D`, in place.

    Returns:
        Signs, the inner products they were decided on, and squared lengths. A row whose squared length is not
        finite gets `+1` and is not added.
    """
    parallel = rows_KD.shape[1] >= _PARALLEL_DIM
    signs_K, s_K, lengths_K = np.empty((3, len(rows_KD)))
    with np.errstate(all="ignore"):
        _kernel(parallel)(rows_KD, running_sum_D, thresholds_K, signs_K, s_K, lengths_K)
    return signs_K, s_K, lengths_K


@functools.cache
def _kernel(parallel: bool) -> Callable[..., None]:
    import numba

    span = numba.prange if parallel else range

    # Sums may be reordered (that is what makes them fast), but NaN must stay NaN: hence not all of `fastmath`.
    @numba.njit(parallel=parallel, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
    def kernel(rows, running_sum, thresholds, signs, products, lengths):  # type: ignore[no-untyped-def]
        zero = running_sum.dtype.type(0)
        for k in range(rows.shape[0]):
            s = zero
            b2 = zero
            for i in span(rows.shape[1]):
                s += running_sum[i] * rows[k, i]
                b2 += rows[k, i] * rows[k, i]
            products[k] = s
            lengths[k] = b2
            if not b2 < np.inf:  # infinite or NaN; isfinite() is written as x - x, which reordering folds away
                signs[k] = 1.0
                continue
            sign = running_sum.dtype.type(1 if s <= thresholds[k] else -1)
            for i in span(rows.shape[1]):
                running_sum[i] += sign * rows[k, i]
            signs[k] = sign

    return kernel

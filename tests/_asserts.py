"""Properties as functions, applied to the inputs of `_inputs.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def assert_permutation(order: npt.ArrayLike, of: npt.ArrayLike) -> None:
    np.testing.assert_array_equal(np.sort(np.asarray(order)), np.sort(np.asarray(of)))


def assert_follows_the_rule(rows_KD: Tensor, signs_K: npt.ArrayLike, thresholds_K: npt.ArrayLike = 0.0) -> float:
    """Every sign is the one the rule demands, unless its inner product is within rounding of the threshold.

    The rows are replayed in float64 with the signs found, so that one sign within rounding does not put the later ones
    in question. Whatever the order of summation, the inner product `s_k`, a sum of `k * D` products, is off by at most
    `(D + k + 2) * eps * sum over j < k of sum over i of |d_ji d_ki|`.

    Returns:
        The share of signs that were not within rounding, so that callers can demand that the test has teeth.
    """
    eps = torch.finfo(rows_KD.dtype).eps
    rows, signs = rows_KD.double().numpy(), np.asarray(signs_K, dtype=np.float64)
    before = np.cumsum(signs[:, None] * rows, axis=0) - signs[:, None] * rows
    mass = np.cumsum(abs(rows), axis=0) - abs(rows)
    s = (before * rows).sum(1)
    margin = (rows.shape[1] + np.arange(len(rows)) + 2) * eps * (mass * abs(rows)).sum(1)
    demanded = np.where(s <= thresholds_K, 1, -1)
    clear = abs(s - thresholds_K) > margin
    clear |= (mass * abs(rows)).sum(1) == 0  # an inner product of nothing is exactly zero
    np.testing.assert_array_equal(signs[clear], demanded[clear])
    return float(clear.mean())

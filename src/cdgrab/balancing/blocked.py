"""Signs of a block of rows from its table of inner products.

Let `d_1 .. d_K` be rows in balancing order and `r` the running sum before them. Row `k` meets the running sum
`r + e_1 d_1 + ... + e_{k-1} d_{k-1}`, so its inner product with it is

    s_k = <r, d_k> + sum over j < k of e_j <d_j, d_k>.

The `K` signs therefore follow from `K` dots with `r` and the `K x K` Gram matrix alone; then `r += e @ rows`, once.
This is the paper's loop exactly, up to rounding. The caller needs the table, not the rows.
"""

from __future__ import annotations

import numpy as np

from cdgrab.balancing.rules import FloatArray

# The loop decides this many signs in plain Python, then updates the remaining inner products in one call.
_CHUNK = 8


def block_signs(gram_KK: FloatArray, dots_K: FloatArray, thresholds_K: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Decide the signs of `K` rows from their inner products.

    Args:
        gram_KK: Inner products of the rows with each other.
        dots_K: Inner products of the rows with the running sum before the first of them.
        thresholds_K: Row `k` is `+1` if and only if `s_k <= thresholds_K[k]`.

    Returns:
        The signs (`+1.0` or `-1.0`) and the inner products `s_K` that decided them.

    Example:
        >>> rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> block_signs(rows @ rows.T, np.zeros(3), np.zeros(3))[0]
        array([ 1., -1.,  1.])
    """
    s_K = dots_K.copy()
    signs_K = np.empty(len(s_K))
    for start in range(0, len(s_K), _CHUNK):
        stop = min(start + _CHUNK, len(s_K))
        table = gram_KK[start:stop, start:stop].tolist()
        dots = s_K[start:stop].tolist()
        limits = thresholds_K[start:stop].tolist()
        signs: list[float] = []
        for k, row in enumerate(table):
            s = dots[k]
            for sign, product in zip(signs, row, strict=False):
                s += sign * product
            dots[k] = s
            signs.append(1.0 if s <= limits[k] else -1.0)
        s_K[start:stop] = dots
        signs_K[start:stop] = signs
        s_K[stop:] += signs_K[start:stop] @ gram_KK[start:stop, stop:]
    return signs_K, s_K

"""Signs -> next order. The one place where a sign becomes a position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cdgrab.lanes import IntArray

SignArray = npt.NDArray[np.int8]


def next_order(order_N: IntArray, signs_N: SignArray) -> IntArray:
    """Plus keeps its turn, minus goes to the back in reverse, undecided (0) stays in the middle.

    The two units of a pair carry opposite signs, so pair `k` fills the slots `k` and `N - 1 - k`. A unit without
    a partner, or one that was not visited, is undecided: in the middle it moves least, and it is visited next time
    even where every epoch is cut short.

    Example:
        >>> next_order(np.array([10, 11, 12, 13, 14]), np.array([1, -1, -1, 1, 0], dtype=np.int8))
        array([10, 13, 14, 12, 11])
    """
    return np.concatenate([order_N[signs_N > 0], order_N[signs_N == 0], order_N[signs_N < 0][::-1]])


def pair_signs(signs_K: SignArray) -> SignArray:
    """One sign per pair -> one per unit: the first of a pair carries the sign, the second its opposite."""
    return np.stack([signs_K, -signs_K], axis=1).reshape(-1)

"""Signs -> next order. Only this module turns a sign into a position.

Shapes: `V` visits, `J` lanes, `N` units in all; `P` pairs of visits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cdgrab.lanes import IntArray

SignArray = npt.NDArray[np.int8]


def next_order(units_VJ: IntArray, signs_VJ: SignArray) -> IntArray:
    """The next order. In each lane plus units come first, then undecided ones (0), then minus units in reverse.

    The two units of a pair carry opposite signs, so pair `k` of a lane with `U` units fills its places `k` and
    `U - 1 - k`. A unit without a partner, or one that was not visited, is undecided. In the middle it moves least, and
    the next epoch visits it even if every epoch is cut short.

    Args:
        units_VJ: The units of every lane in the order in which it visited them, -1 where it had none.
        signs_VJ: Their signs.

    Returns:
        The next order of all lanes, visit by visit.

    Example:
        >>> units = np.array([[10], [11], [12], [13], [14]])
        >>> next_order(units, np.array([[1], [-1], [-1], [1], [0]], dtype=np.int8))
        array([10, 13, 14, 12, 11])
    """
    num_lanes = units_VJ.shape[1]
    there = units_VJ >= 0
    plus, minus = there & (signs_VJ > 0), there & (signs_VJ < 0)
    middle = there & (signs_VJ == 0)
    count = np.int32 if units_VJ.shape[0] < 2**31 else np.int64
    place_VJ = np.where(plus, plus.cumsum(0, dtype=count) - 1, there.sum(0, dtype=count) - minus.cumsum(0, dtype=count))
    place_VJ = np.where(middle, plus.sum(0, dtype=count) + middle.cumsum(0, dtype=count) - 1, place_VJ)
    visit_by_visit = place_VJ.astype(np.int64) * num_lanes + np.arange(num_lanes)
    order_N = np.empty(int(there.sum()), dtype=units_VJ.dtype)
    order_N[visit_by_visit[there]] = units_VJ[there]
    return order_N


def by_visit(order_N: IntArray, num_lanes: int) -> IntArray:
    """The order of all lanes as lines, `V x J`; -1 for lanes without a unit in the last line."""
    missing = -len(order_N) % num_lanes
    return np.pad(order_N, (0, missing), constant_values=-1).reshape(-1, num_lanes)


def pair_signs(signs_PJ: SignArray) -> SignArray:
    """One sign per unit from one per pair: the first of a pair carries the sign, the second its opposite."""
    return np.stack([signs_PJ, -signs_PJ], axis=1).reshape(-1, *signs_PJ.shape[1:])


def padded(signs_VJ: SignArray, visits: int) -> SignArray:
    """The signs of `visits` visits: 0 where there is none. Later visits, which hold no units, are left out."""
    signs_VJ = signs_VJ[:visits]
    return np.pad(signs_VJ, ((0, visits - len(signs_VJ)), (0, 0)))


def from_lanes(units: list[IntArray]) -> IntArray:
    """The order of all lanes, visit by visit, from that of each. No lane may have more units than an earlier one.

    Example:
        >>> from_lanes([np.array([2, 0, 4]), np.array([1, 3])])
        array([2, 1, 0, 3, 4])
    """
    order_N = np.empty(sum(map(len, units)), dtype=units[0].dtype)
    for lane, mine in enumerate(units):
        order_N[lane :: len(units)] = mine
    return order_N

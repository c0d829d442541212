"""Figures over seeds: means with their intervals, and what a difference between two orders says.

Seeds differ, and so do orders that were drawn by chance. A difference is a gain only if its interval has no zero in it.
It is no gain if its interval leaves out the gap that one is looking for. In between, the seeds cannot tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["gain", "none", "unclear", "unknown"]
POWER = 0.8
LARGEST = 1e100  # beyond it sums of squares may overflow; only a run that diverges comes there


@dataclass(frozen=True)
class Estimate:
    """A figure over seeds.

    Attributes:
        deviation: Standard deviation of single seeds; None for one seed.
        half_width: Of the 95 % interval of the mean, by Student's t: with the three to five seeds of an experiment a
            bootstrap would draw from so few values that its interval comes out too narrow. None for one seed.
        count: How many seeds.
    """

    mean: float
    deviation: float | None
    half_width: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None if there are no values; values that are no numbers, or whose sums are none, count as absent."""
        values = [value for value in values if abs(value) < LARGEST]
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], None, None, 1)
        deviation = statistics.stdev(values)
        half_width = student_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
        return cls(statistics.fmean(values), deviation, half_width, len(values))

    def surely_below(self, bound: float) -> bool:
        """Whether the whole interval is; never for one seed."""
        return self.half_width is not None and self.mean + self.half_width < bound

    def surely_above(self, bound: float) -> bool:
        """Whether the whole interval is; never for one seed."""
        return self.half_width is not None and self.mean - self.half_width > bound


@dataclass(frozen=True)
class Gap:
    """The difference in final loss that an experiment should be able to see.

    Attributes:
        source: What it is, in words that follow "to see".
    """

    value: float
    source: str


def judged(difference: Estimate | None, gap: Gap | None, *, tried: int, diverged: int) -> Outcome:
    """What the seeds say about an order.

    Args:
        difference: Of final losses, the order's minus the rival's, seed by seed.
        gap: What one is looking for; None if nothing is known.
        tried: Seeds that could be compared, diverged ones included.
        diverged: How many of them diverged with this order, but not with the rival.
    """
    if tried == 0:
        return "unknown"
    if difference is None:
        return "none"  # all have diverged
    if difference.surely_below(0.0):
        return "unclear" if diverged else "gain"
    return "none" if difference.surely_above(-gap.value if gap else 0.0) or _nothing(difference) else "unclear"


def seeds_needed(deviation: float, gap: float) -> int:
    """The pairs of seeds with which a paired t-test at 5 % sees `gap` in 4 of 5 experiments.

    The normal approximation with Guenther's correction, which is within a seed of the exact number.

    Args:
        deviation: Standard deviation of paired differences.
        gap: Their mean, if there is something to see.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    both = z + statistics.NormalDist().inv_cdf(POWER)
    return max(2, math.ceil((both * deviation / gap) ** 2 + z**2 / 2))


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: a table, and beyond it the expansion around the normal one."""
    table = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
    if freedom <= len(table):
        return table[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + first + second + third


def _nothing(difference: Estimate) -> bool:
    """Whether all seeds end at the same loss with both orders."""
    return difference.mean == 0 and difference.half_width == 0

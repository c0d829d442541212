"""What the theorems promise, as intervals for the slope of a log-log plot.

Under the PL condition the theorems choose a step of about `log(T) / T` and promise `T^-2` up to logarithms: a constant
step of that size leaves an error proportional to its square, `log(T)^2 / T^2`. Sampling with replacement leaves
one proportional to the step itself. A fit over finite horizons sees the logarithm as a smaller slope, so the interval
reaches from the power itself to the power with its logarithms, fitted over the same horizons.

For smooth non-convex functions the promise is of the mean over epochs of the squared gradient norm; no logarithm.

In the number of epochs all permutation-based orders share these powers. What balancing changes is how the error depends
on the number of units and of workers: see `speedup`.
"""

from __future__ import annotations

import numpy as np

from cdgrab_experiments.theory.fits import Array, slope

Interval = tuple[float, float]


def pl_slope(order: str, horizons_H: Array) -> Interval:
    """Error against epochs under PL: `-2`, with replacement `-1`, and what the logarithms make of it.

    Example:
        >>> low, high = pl_slope("rr", np.array([16.0, 1024.0]))
        >>> low, round(high, 2)
        (-2.0, -1.56)
    """
    power = 1.0 if order == "with-replacement" else 2.0
    return -power, float(slope(horizons_H, (np.log(horizons_H) / horizons_H) ** power))


def non_convex_slope(order: str) -> Interval:
    """Mean squared gradient norm against epochs: `-2/3`, with replacement `-1/2`."""
    power = -1 / 2 if order == "with-replacement" else -2 / 3
    return power, power


# The deviation of a prefix against the number of workers, units per worker fixed. Coordinated, the running sum stays as
# long as it was while the mean divides it by W; at random, W sums of random directions add up to sqrt(W).
WORKER_POWERS = {"cd-grab": 1.0, "rr": 0.5}


def speedup_slope(order: str, *, pl: bool) -> float:
    """Error against the number of workers: the deviation's power, squared under PL, to the power 2/3 otherwise."""
    return -WORKER_POWERS[order] * (2.0 if pl else 2 / 3)

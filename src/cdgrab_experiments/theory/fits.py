"""From errors of many runs to slopes with confidence intervals.

Shapes: `G` step sizes, `S` seeds, `H` horizons (or numbers of workers).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_BEYOND = 1e100


@dataclass(frozen=True)
class Slope:
    """A fitted slope and its interval of confidence, 95%."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Tuned:
    """Mean error at every horizon with the step size that is best there.

    Attributes:
        errors_H: The mean over seeds.
        low_H: Lower end of its interval of confidence.
        high_H: Upper end.
        best_H: Which step size it was.
        slope: Of log error against the log of whatever runs across.
    """

    errors_H: Array
    low_H: Array
    high_H: Array
    best_H: npt.NDArray[np.int64]
    slope: Slope


def slope(across_H: Array, errors: Array) -> Array:
    """Least-squares slopes of log `errors` (`... x H`) against log `across_H`.

    Example:
        >>> x = np.array([1.0, 2.0, 4.0])
        >>> float(slope(x, 5 * x**-2).round(9))
        -2.0
    """
    x = np.log(across_H) - np.log(across_H).mean()
    slopes: Array = (np.log(errors) * x).sum(-1) / (x * x).sum()
    return slopes


def tuned(errors_GSH: Array, across_H: Array, *, resamples: int, seed: int = 0) -> Tuned:
    """Tune the step size separately at every horizon, as the theorems do, and fit a slope.

    A step size is judged by its mean error over seeds, so no seed picks its own. The interval comes from drawing seeds
    with replacement and doing everything again, tuning included. A run that has diverged counts as an infinite error.
    """
    errors_GSH = diverged_to_infinity(errors_GSH)
    num_seeds = errors_GSH.shape[1]
    means_GH = errors_GSH.mean(1)
    best_H = means_GH.argmin(0)
    errors_H = means_GH.min(0)
    draws_RS = np.random.default_rng(seed).integers(num_seeds, size=(resamples, num_seeds))
    drawn_RH = np.stack([errors_GSH[:, draws_S].mean(1).min(0) for draws_S in draws_RS])
    low_H, high_H = np.quantile(drawn_RH, [0.025, 0.975], axis=0)
    low, high = np.quantile(slope(across_H, drawn_RH), [0.025, 0.975])
    return Tuned(errors_H, low_H, high_H, best_H, Slope(float(slope(across_H, errors_H)), float(low), float(high)))


def diverged_to_infinity(errors: Array) -> Array:
    """Errors, with infinity for those that are not numbers or beyond all bounds: sums of those would overflow."""
    return np.where(errors < _BEYOND, errors, np.inf)


def ratio_interval(above_S: Array, below_S: Array, *, resamples: int, seed: int = 0) -> Slope:
    """The ratio of two means over the same seeds, with its interval of confidence; NaN if both are infinite."""
    draws_RS = np.random.default_rng(seed).integers(len(above_S), size=(resamples, len(above_S)))
    with np.errstate(invalid="ignore"):
        ratios_R = above_S[draws_RS].mean(1) / below_S[draws_RS].mean(1)
        low, high = np.quantile(ratios_R, [0.025, 0.975])
        return Slope(float(above_S.mean() / below_S.mean()), float(low), float(high))

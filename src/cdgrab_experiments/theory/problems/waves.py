"""A parabola with waves, `flat * x^2 + wave * sin(x)^2` in every coordinate: not convex, its minimum at the origin.

With gentle waves the only stationary point is the minimum, and the function obeys the Polyak-Lojasiewicz condition
without being convex: `x^2 + 3 sin(x)^2` is the standard example (Karimi, Nutini and Schmidt, 2016), its curvature goes
down to -4. With high waves there are local minima and maxima: no PL, and all that can be asked for is a small gradient.

The mean over units is this function exactly, for any number of units. So runs with few and with many workers descend
the same landscape, and only the order makes a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cdgrab_experiments.theory.descent import Parts


@dataclass
class Waves:
    """The mean of `sum over d of (1 + c_d) (flat x_d^2 + wave sin(x_d)^2) + b_d x_d`; `c` and `b` have mean zero.

    Units differ in slope (`b`) and in curvature (`c`).

    Attributes:
        goal: The error is the height above the minimum, or the squared norm of the gradient.
        reach: Runs start at random, with coordinates up to this large.
        noise: Deviation of the slopes `b`.
        spread: Deviation of the factors `c`.
    """

    seeds: int
    num_units: int
    dim: int
    goal: Literal["value", "gradient"]
    flat: float
    wave: float
    reach: float
    noise: float
    spread: float

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.num_units)
        normal = torch.randn(2, self.seeds, self.num_units, self.dim, generator=rng, dtype=torch.float64)
        normal -= normal.mean(2, keepdim=True)
        self._factors = 1 + self.spread * normal[0].flatten(0, 1)
        self._slopes = self.noise * normal[1].flatten(0, 1)

    def start(self) -> Tensor:
        # From a generator of its own: with any number of units the runs of a seed start at the same place.
        rng = torch.Generator().manual_seed(0)
        return self.reach * (2 * torch.rand(self.seeds, self.dim, generator=rng, dtype=torch.float64) - 1)

    def take(self, index: Tensor) -> Parts:
        return self._factors[index], self._slopes[index]

    def rows(self, theta_BD: Tensor, parts: Parts) -> Tensor:
        factors_BWD, slopes_BWD = parts
        return torch.addcmul(slopes_BWD, factors_BWD, self._gradient(theta_BD)[:, None])

    def error(self, theta_GSD: Tensor) -> Tensor:
        if self.goal == "gradient":
            return self._gradient(theta_GSD).square().sum(-1)
        return (self.flat * theta_GSD.square() + self.wave * torch.sin(theta_GSD).square()).sum(-1)

    def _gradient(self, x: Tensor) -> Tensor:
        return 2 * self.flat * x + self.wave * torch.sin(2 * x)

"""Least squares with a prescribed Hessian: strongly convex, the optimum is the origin.

Because the optimum and the Hessian are exact, the error is a sum of squares of the parameters themselves. Nothing is
subtracted, so it is right to the last digit however small it gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cdgrab_experiments.theory.descent import Parts


@dataclass
class LeastSquares:
    """Half the mean of `(a . x - b)^2`.

    Features are whitened and scaled, so that the Hessian is `diag(eigenvalues)` for every seed; targets are noise
    orthogonal to all features, so that the gradient of the mean vanishes at zero while those of the units do not.

    Attributes:
        noise: Root mean square of the targets.
        distance: Every coordinate starts here.
    """

    seeds: int
    num_units: int
    dim: int
    curvature: tuple[float, float]
    noise: float = 1.0
    distance: float = 1.0

    def __post_init__(self) -> None:
        low, high = self.curvature
        self.eigenvalues_D = torch.logspace(0, 1, self.dim, base=high / low, dtype=torch.float64) * low
        features, targets = [], []
        for seed in range(self.seeds):
            rng = torch.Generator().manual_seed(seed)
            white_ND = torch.randn(self.num_units, self.dim, generator=rng, dtype=torch.float64)
            white_ND = torch.linalg.qr(white_ND).Q * self.num_units**0.5
            noise_N = torch.randn(self.num_units, generator=rng, dtype=torch.float64)
            noise_N -= white_ND @ (white_ND.T @ noise_N) / self.num_units
            features.append(white_ND * self.eigenvalues_D.sqrt())
            targets.append(noise_N * (self.noise / noise_N.square().mean().sqrt()))
        self._features, self._targets = torch.cat(features), torch.cat(targets)

    def start(self) -> Tensor:
        return torch.full((self.seeds, self.dim), self.distance, dtype=torch.float64)

    def take(self, index: Tensor) -> Parts:
        return self._features[index], self._targets[index]

    def rows(self, theta_BD: Tensor, parts: Parts) -> Tensor:
        a_BWD, b_BW = parts
        residual_BW = torch.bmm(a_BWD, theta_BD[:, :, None])[..., 0] - b_BW
        return a_BWD * residual_BW[..., None]

    def error(self, theta_GSD: Tensor) -> Tensor:
        return (theta_GSD.square() * self.eigenvalues_D).sum(-1) / 2

"""Steps for many runs at once, each with its own step size: SGD, momentum, Adam and AdamW, as `torch.optim` has them.

Shapes: `B` runs, `D` parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Optimiser(Protocol):
    """Changes the parameters of all runs, in place."""

    def step(self, theta_BD: Tensor, grad_BD: Tensor) -> None: ...


OptimiserMaker = Callable[[Tensor], Optimiser]


class Sgd:
    """Plain steps, or with momentum."""

    def __init__(self, steps_B: Tensor, momentum: float = 0.0) -> None:
        self._steps_B1, self._momentum = steps_B[:, None], momentum
        self._velocity_BD: Tensor | None = None

    def step(self, theta_BD: Tensor, grad_BD: Tensor) -> None:
        if self._momentum:
            if self._velocity_BD is None:
                self._velocity_BD = torch.zeros_like(theta_BD)
            grad_BD = self._velocity_BD.mul_(self._momentum).add_(grad_BD)
        theta_BD.addcmul_(self._steps_B1, grad_BD, value=-1)


class Adam:
    """Adam, and AdamW where `weight_decay` is not zero."""

    def __init__(self, steps_B: Tensor, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self._steps_B1, self._weight_decay, self._betas = steps_B[:, None], weight_decay, betas
        self._count = 0
        self._moments: tuple[Tensor, Tensor] | None = None

    def step(self, theta_BD: Tensor, grad_BD: Tensor) -> None:
        if self._moments is None:
            self._moments = torch.zeros_like(theta_BD), torch.zeros_like(theta_BD)
        self._count += 1
        (first, second), (beta, gamma) = self._moments, self._betas
        first.mul_(beta).add_(grad_BD, alpha=1 - beta)
        second.mul_(gamma).addcmul_(grad_BD, grad_BD, value=1 - gamma)
        scale = (second / (1 - gamma**self._count)).sqrt_().add_(1e-8)
        if self._weight_decay:
            theta_BD.mul_(1 - self._steps_B1 * self._weight_decay)
        theta_BD.addcdiv_(first * self._steps_B1, scale, value=-1 / (1 - beta**self._count))

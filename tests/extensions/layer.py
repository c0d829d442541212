"""A layer: every feature is multiplied by a weight of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cdgrab


class Scaling(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@cdgrab.register_layer(Scaling)
def scaling(module: Scaling, x: Tensor, grad: Tensor, num: int) -> dict[str, cdgrab.factors.Factors]:
    return {"weight": cdgrab.factors.Summed((grad * x).reshape(num, -1, len(module.weight)))}

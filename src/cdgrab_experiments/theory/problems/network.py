"""Small networks with gradients written out by hand, for many runs at once: softmax regression, and one hidden layer.

Shapes: `G` step sizes, `S` seeds, `B` runs, `W` workers, `N` units, `F` features, `C` outputs, `D` parameters.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cdgrab_experiments.theory.descent import Parts

Layer = tuple[Tensor, Tensor]  # what came in, and the gradient of what went out


@dataclass
class Network:
    """The mean over units of a loss plus `l2 / 2 |parameters|^2`.

    Attributes:
        x_SNF: Inputs of every seed's units, in the order dealt.
        y_SN: Labels (integers: cross-entropy) or targets (otherwise: half the squared error, one output).
        outputs: Number of classes, or 1.
        hidden: Width of the hidden layer (tanh); 0 for none, which makes the problem convex.
        goal: The error is the loss above the floor, or the squared norm of the gradient.
        floors_S: The smallest possible losses, where they are known.
    """

    x_SNF: Tensor
    y_SN: Tensor
    outputs: int
    hidden: int
    l2: float
    goal: Literal["loss", "gradient"] = "loss"
    floors_S: Tensor | float = 0.0

    def __post_init__(self) -> None:
        self.num_units = self.x_SNF.shape[1]
        widths = [self.x_SNF.shape[2], *([self.hidden] if self.hidden else []), self.outputs]
        self._shapes = list(itertools.pairwise(widths))
        self.dim = sum((fan_in + 1) * fan_out for fan_in, fan_out in self._shapes)
        self._flat = self.x_SNF.flatten(0, 1), self.y_SN.flatten()

    def start(self) -> Tensor:
        seeds, dtype = self.x_SNF.shape[0], self.x_SNF.dtype
        if not self.hidden:
            return torch.zeros(seeds, self.dim, dtype=dtype)
        rng, parts = torch.Generator().manual_seed(0), []
        for fan_in, fan_out in self._shapes:
            parts.append(torch.randn(seeds, fan_in * fan_out, generator=rng, dtype=torch.float64) / fan_in**0.5)
            parts.append(torch.zeros(seeds, fan_out, dtype=torch.float64))
        return torch.cat(parts, dim=1).to(dtype)

    def take(self, index: Tensor) -> Parts:
        return self._flat[0][index], self._flat[1][index]

    def rows(self, theta_BD: Tensor, parts: Parts) -> Tensor:
        x_BWF, y_BW = parts
        rows = []
        for inputs, delta in self._backward(theta_BD, x_BWF, y_BW)[0]:
            rows += [(inputs[..., :, None] * delta[..., None, :]).flatten(2), delta]
        return torch.cat(rows, dim=-1).add_(theta_BD[:, None], alpha=self.l2)

    def error(self, theta_GSD: Tensor) -> Tensor:
        if self.goal == "gradient":
            return self.gradient(theta_GSD).square().sum(-1)
        return self.loss(theta_GSD) - self.floors_S

    def loss(self, theta_GSD: Tensor) -> Tensor:
        """The mean loss over all units: `G x S`."""
        theta_BD, x_BNF, y_BN = self._whole(theta_GSD)
        losses_B = self._backward(theta_BD, x_BNF, y_BN)[1].mean(1) + self.l2 / 2 * theta_BD.square().sum(1)
        return losses_B.view(theta_GSD.shape[:2])

    def gradient(self, theta_GSD: Tensor) -> Tensor:
        """The gradient of the mean loss: `G x S x D`."""
        theta_BD, x_BNF, y_BN = self._whole(theta_GSD)
        means = []
        for inputs, delta in self._backward(theta_BD, x_BNF, y_BN)[0]:
            means += [(inputs.mT @ delta).flatten(1) / self.num_units, delta.mean(1)]
        return torch.cat(means, dim=1).add_(theta_BD, alpha=self.l2).view(theta_GSD.shape)

    def minimum(self) -> Tensor:
        """The optimum for every seed (`S x D`), by Newton's method; for convex problems."""
        found = []
        for seed in range(self.x_SNF.shape[0]):
            alone = Network(self.x_SNF[seed, None].double(), self.y_SN[seed, None], self.outputs, 0, self.l2)
            theta_D = torch.zeros(self.dim, dtype=torch.float64)
            for _ in range(50):
                grad_D = alone.gradient(theta_D[None, None])[0, 0]
                if grad_D.norm() < 1e-13:
                    break
                theta_D = theta_D - torch.linalg.solve(alone._hessian(theta_D), grad_D)
            found.append(theta_D)
        return torch.stack(found)

    def _hessian(self, theta_D: Tensor) -> Tensor:
        """Of softmax regression with one seed's data: `sum over units of (x x^T) times (diag(p) - p p^T)`."""
        x_NF = self.x_SNF[0]
        weight, bias = self._layers(theta_D[None])[0]
        p_NC = torch.softmax(x_NF @ weight[0] + bias[0], dim=1)
        inner_NCC = torch.diag_embed(p_NC) - p_NC[:, :, None] * p_NC[:, None, :]
        ones_NF = torch.cat([x_NF, torch.ones(len(x_NF), 1, dtype=x_NF.dtype)], dim=1)
        hessian = torch.einsum("nf,ncd,ng->fcgd", ones_NF, inner_NCC, ones_NF) / len(x_NF)
        return hessian.reshape(self.dim, self.dim) + self.l2 * torch.eye(self.dim, dtype=x_NF.dtype)

    def _whole(self, theta_GSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters of all runs, each with all data of its seed."""
        repeated = theta_GSD.shape[0]
        return theta_GSD.flatten(0, 1), self.x_SNF.repeat(repeated, 1, 1), self.y_SN.repeat(repeated, 1)

    def _layers(self, theta_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases as views of the parameters."""
        layers, start = [], 0
        for fan_in, fan_out in self._shapes:
            middle, end = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
            layers.append((theta_BD[:, start:middle].view(-1, fan_in, fan_out), theta_BD[:, None, middle:end]))
            start = end
        return layers

    def _backward(self, theta_BD: Tensor, x_BKF: Tensor, y_BK: Tensor) -> tuple[list[Layer], Tensor]:
        """For `K` units of every run: inputs and output gradients of each layer, and the losses."""
        layers = self._layers(theta_BD)
        inputs = [x_BKF]
        for weight, bias in layers[:-1]:
            inputs.append(torch.tanh(torch.baddbmm(bias, inputs[-1], weight)))
        out_BKC = torch.baddbmm(layers[-1][1], inputs[-1], layers[-1][0])
        if y_BK.is_floating_point():
            delta = out_BKC - y_BK[..., None]
            losses_BK = delta[..., 0].square() / 2
        else:
            log_p_BKC = torch.log_softmax(out_BKC, dim=-1)
            losses_BK = -log_p_BKC.gather(-1, y_BK[..., None])[..., 0]
            delta = log_p_BKC.exp()
            delta.scatter_add_(-1, y_BK[..., None], torch.full_like(delta[..., :1], -1.0))
        found = [(inputs[-1], delta)]
        for depth in range(len(layers) - 1, 0, -1):
            delta = (delta @ layers[depth][0].mT) * (1 - inputs[depth].square())
            found.insert(0, (inputs[depth - 1], delta))
        return found, losses_BK

"""Handwritten digits, bundled with scikit-learn: softmax regression and a small network.

Every example's gradient is written out by hand: with models this small the automatic one costs ten times the step, and
one would be comparing overheads. A test holds it against automatic differentiation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The first 1792 of 1797 images: 4 and 16 workers then have equal shares, without padding.
NUM_EXAMPLES = 1792
NUM_CLASSES = 10


@dataclass(frozen=True)
class Network:
    """Layers of the given widths with tanh between them; its parameters are one flat tensor.

    The loss of an example is cross-entropy plus `l2 / 2 * ||parameters||^2`.
    """

    widths: tuple[int, ...]
    l2: float

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in self._shapes())

    def init(self, seed: int) -> Tensor:
        """Parameters to start from: zero for softmax regression, random otherwise."""
        if len(self.widths) == 2:
            return torch.zeros(self.dim)
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for fan_in, fan_out in self._shapes():
            parts += [torch.randn(fan_in * fan_out, generator=generator) / math.sqrt(fan_in), torch.zeros(fan_out)]
        return torch.cat(parts)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss over the examples."""
        logits = self._forward(theta, x)[-1]
        return torch.nn.functional.cross_entropy(logits, y) + self.l2 / 2 * theta.square().sum()

    def rows(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Gradient of every example's loss: `examples x dim`."""
        outputs = self._forward(theta, x)
        layers = self._layers(theta)
        delta = torch.softmax(outputs[-1], dim=1)
        delta[torch.arange(len(y)), y] -= 1
        parts: list[Tensor] = []
        for depth in reversed(range(len(layers))):
            inputs = outputs[depth]
            parts = [(delta[:, :, None] * inputs[:, None, :]).flatten(1), delta, *parts]
            if depth:
                delta = (delta @ layers[depth][0]) * (1 - inputs.square())
        return torch.cat(parts, dim=1).add_(theta, alpha=self.l2)

    def _shapes(self) -> list[tuple[int, int]]:
        return list(zip(self.widths[:-1], self.widths[1:], strict=True))

    def _layers(self, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases as views of the parameters."""
        layers, start = [], 0
        for fan_in, fan_out in self._shapes():
            middle, end = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
            layers.append((theta[start:middle].view(fan_out, fan_in), theta[middle:end]))
            start = end
        return layers

    def _forward(self, theta: Tensor, x: Tensor) -> list[Tensor]:
        """Inputs of every layer, then the logits."""
        outputs = [x]
        layers = self._layers(theta)
        for depth, (weight, bias) in enumerate(layers):
            linear = torch.addmm(bias, outputs[-1], weight.T)
            outputs.append(linear if depth == len(layers) - 1 else torch.tanh(linear))
        return outputs


SOFTMAX_REGRESSION = Network((64, NUM_CLASSES), l2=1e-3)
SMALL_MLP = Network((64, 32, NUM_CLASSES), l2=1e-3)


def load() -> tuple[Tensor, Tensor]:
    """Images as rows of 64 numbers in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:NUM_EXAMPLES] / 16, dtype=torch.float32)
    return x, torch.tensor(labels[:NUM_EXAMPLES], dtype=torch.int64)


def minimum(model: Network, x: Tensor, y: Tensor) -> float:
    """The smallest possible loss of a convex model, to about twelve digits."""
    theta = torch.zeros(model.dim, dtype=torch.float64, requires_grad=True)
    x = x.double()
    solver = torch.optim.LBFGS(
        [theta], max_iter=2000, tolerance_grad=1e-9, tolerance_change=0, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = model.loss(theta, x, y)
        loss.backward()
        return loss

    solver.step(closure)
    return float(model.loss(theta.detach(), x, y))

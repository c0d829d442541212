"""Handwritten digits, bundled with scikit-learn: softmax regression and a small network.

Every example's gradient is written out by hand: with models this small the automatic one costs ten times the step, and
one would be comparing overheads. A test holds it against automatic differentiation.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments.tasks.base import LateRows, Problem, Settings, Task
from cdgrab_experiments.tasks.tools import classifier_figures, seeded

# Of 1797 images; 4, 16 and 64 workers then have equal shares, without padding.
NUM_TRAIN = 1536
NUM_CLASSES = 10
L2 = 1e-3
WIDTHS = {"softmax": (64, NUM_CLASSES), "mlp": (64, 32, NUM_CLASSES)}


class Network(nn.Sequential):
    """Layers of the given widths with tanh between them: zero at the start for softmax regression, random otherwise."""

    def __init__(self, widths: tuple[int, ...], seed: int) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
        super().__init__(*layers[:-1])
        with seeded(seed), torch.no_grad():
            for layer in self.linear():
                layer.bias.zero_()
                layer.weight.normal_(std=1 / math.sqrt(layer.in_features) if len(widths) > 2 else 0.0)

    def linear(self) -> list[nn.Linear]:
        """The layers with parameters."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over the examples, plus `L2 / 2 * ||parameters||^2`."""
    penalty = sum((p.square().sum() for p in model.parameters()), start=torch.zeros((), device=x.device))
    return F.cross_entropy(model(x), y) + L2 / 2 * penalty


def gradient(
    model: Network,
    x: Tensor,
    y: Tensor,
    rows: Tensor | None = None,
    kept: tuple[Tensor, ...] = (),
) -> Tensor:
    """Of the mean loss, and of every example's if there are rows to fill; `kept`: places for what `late_rows` needs."""
    parts: list[Tensor] = []
    passed = _passed(model, x, y)
    for layer, inputs, delta in passed:
        weight, bias = layer.weight.detach(), layer.bias.detach()
        parts += [torch.addmm(weight, delta.T, inputs, beta=L2, alpha=1 / len(x)).flatten()]
        parts += [torch.add(delta.mean(0), bias, alpha=L2)]
    if rows is not None or kept:
        parameters = [p.detach().flatten() for layer, _, _ in passed for p in (layer.weight, layer.bias)]
        deltas, hidden = [delta for _, _, delta in passed], [inputs for _, inputs, _ in passed[1:]]
        if kept:
            torch.cat(parameters, out=kept[0])
            for place, tensor in zip(kept[1:], [*deltas, *hidden], strict=True):
                place.copy_(tensor)
        if rows is not None:
            _rows(torch.cat(parameters), [x, *hidden], deltas, out=rows)
    return torch.cat(parts)


def late_rows(kept: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Gradients of the examples of several steps."""
    parameters_SD, *rest = kept
    num_layers = (len(rest) + 1) // 2
    return _rows(parameters_SD, [x, *rest[num_layers:]], rest[:num_layers])


def _rows(parameters_D: Tensor, inputs: list[Tensor], deltas: list[Tensor], out: Tensor | None = None) -> Tensor:
    """Gradients of examples, from inputs and output gradients of all layers; there may be steps in front."""
    penalty_1D = (L2 * parameters_D)[..., None, :]
    found = parameters_D.new_empty(*inputs[0].shape[:-1], parameters_D.shape[-1]) if out is None else out
    shapes = [(delta.shape[-1], x.shape[-1]) for x, delta in zip(inputs, deltas, strict=True)]
    sizes = [size for shape in shapes for size in (math.prod(shape), shape[0])]
    penalties, places = iter(penalty_1D.split(sizes, -1)), iter(found.split(sizes, -1))
    for x, delta, shape in zip(inputs, deltas, shapes, strict=True):
        weight, place = next(penalties).unflatten(-1, shape), next(places).unflatten(-1, shape)
        torch.addcmul(weight, delta[..., None], x[..., None, :], out=place)
        torch.add(delta, next(penalties), out=next(places))
    return found


def _passed(model: Network, x: Tensor, y: Tensor) -> list[tuple[nn.Linear, Tensor, Tensor]]:
    """Every layer with its inputs and the gradients of its outputs."""
    layers = model.linear()
    weights = [(layer.weight.detach(), layer.bias.detach()) for layer in layers]
    inputs = [x]
    for weight, bias in weights[:-1]:
        inputs.append(torch.tanh(torch.addmm(bias, inputs[-1], weight.T)))
    weight, bias = weights[-1]
    delta = torch.softmax(torch.addmm(bias, inputs[-1], weight.T), dim=1)
    delta[torch.arange(len(y), device=y.device), y] -= 1
    deltas = [delta]
    for depth in reversed(range(1, len(layers))):
        deltas.insert(0, (deltas[0] @ weights[depth][0]) * (1 - inputs[depth].square()))
    return list(zip(layers, inputs, deltas, strict=True))


def _sizes(widths: tuple[int, ...], units: int) -> tuple[tuple[int, ...], ...]:
    """Of parameters, of the gradients of outputs, and of inputs that are outputs."""
    dim = sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths))
    return ((dim,), *((units, width) for width in widths[1:]), *((units, width) for width in widths[1:-1]))


def minimum(x: Tensor, y: Tensor) -> float:
    """The smallest possible loss of softmax regression, to about twelve digits."""
    model = Network(WIDTHS["softmax"], seed=0).double()
    x = x.double()
    solver = torch.optim.LBFGS(
        model.parameters(),
        max_iter=2000,
        tolerance_grad=1e-9,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        value = loss(model, x, y)
        value.backward()
        return value

    solver.step(closure)
    with torch.no_grad():
        return float(loss(model, x, y))


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Images as rows of 64 numbers in [0, 1]; the last 261 of them are not trained on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)
    train_x, train_y = x[:NUM_TRAIN], y[:NUM_TRAIN]
    return Problem(
        model=Network(WIDTHS[variant], seed),
        train=(train_x, train_y),
        loss=loss,
        evaluate=classifier_figures(x[NUM_TRAIN:], y[NUM_TRAIN:]),
        metric="accuracy",
        higher_is_better=True,
        data=f"digits of scikit-learn: {NUM_TRAIN:,} / {len(x) - NUM_TRAIN:,} images of 8 x 8, L2 {L2:g}",
        labels=train_y,
        gradient=gradient,
        late=LateRows(gradient, partial(_sizes, WIDTHS[variant]), late_rows),
        minimum=(lambda: minimum(train_x, train_y)) if variant == "softmax" else None,
    )


TASK = Task(
    name="digits",
    title="Digits",
    # A step per example of 0.05; the network, whose curvature is larger, wants a quarter of it.
    settings=Settings(workers=4, batch_size=4, epochs=40, lr=0.2),
    load=load,
    variants=("softmax", "mlp"),
)

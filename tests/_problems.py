"""Small problems with gradients of every kind: in closed form, from layers, and of units of several examples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from _inputs import randn
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.tasks.base import LateRows, Problem


class Logistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta


class Columns(nn.Module):
    """A unit is two sequences of three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x_N23d: Tensor) -> Tensor:
        return self.out(self.lstm(x_N23d.flatten(0, 1))[0]).flatten(0, 1)  # type: ignore[no-any-return]


def closed(num: int) -> Problem:
    x, y = randn(num, 4, dtype=torch.float64), (torch.arange(num) % 2).double()

    def gradient(model: Logistic, x: Tensor, y: Tensor, rows: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return torch.mul(x, (torch.sigmoid(model(x)) - y)[:, None], out=rows).mean(0)

    def accuracy(model: nn.Module) -> dict[str, float]:
        right = (model(x.to(next(model.parameters()).device)) > 0).cpu() == (y > 0)
        return {"accuracy": float(right.double().mean())}

    return Problem(
        Logistic(),
        (x, y),
        lambda model, x, y: binary_cross_entropy_with_logits(model(x), y),
        accuracy,
        "accuracy",
        True,
        "made up",
        labels=y.long(),
        gradient=gradient,
    )


def late(num: int) -> Problem:
    """The same with rows for many steps at once."""

    def gradient(model: Logistic, x: Tensor, y: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            torch.sub(torch.sigmoid(model(x)), y, out=kept[0])
            return (x * kept[0][:, None]).mean(0)

    rows = LateRows(gradient, lambda units: ((units,),), lambda kept, x, y: x * kept[0][..., None])
    return replace(closed(num), late=rows)


def layers(num: int) -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = randn(num, 4, dtype=torch.float64), torch.arange(num) % 3
    return Problem(
        model,
        (x, y),
        lambda model, x, y: cross_entropy(model(x), y),
        lambda _: {"accuracy": 0.5},
        "accuracy",
        True,
        "made up",
        labels=y,
    )


def units(num: int) -> Problem:
    torch.manual_seed(0)
    x, y = randn(num, 2, 3, 4, dtype=torch.float64), torch.arange(num * 6).view(num, 6) % 3
    return Problem(
        Columns().double(),
        (x, y),
        lambda model, x, y: cross_entropy(model(x), y.flatten()),
        lambda _: {"perplexity": 2.0},
        "perplexity",
        False,
        "made up",
        examples=2,
    )


PROBLEMS = {"closed": closed, "late": late, "layers": layers, "units": units}


def config(**changes: object) -> RunConfig:
    """A short run; its task is only a name here."""
    usual: dict[str, object] = {
        "workers": 3,
        "batch_size": 6,
        "epochs": 3,
        "lr": 0.1,
        "momentum": 0.9,
        "schedule": "step:2:0.5",
    }
    return resolve("digits", Choices(**{**usual, **changes}))  # type: ignore[arg-type]

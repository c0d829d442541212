"""Layers from outside: registered in a few lines, through public names only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cdgrab
from _inputs import randn
from _models import rows_of
from cdgrab.per_example import layers


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(layers, "_ADAPTERS", dict(layers._ADAPTERS))


class MyScale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class MyLinear(nn.Linear):
    """Another class than `Linear`."""


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(MyScale(6), MyLinear(6, 70), nn.Tanh(), nn.Linear(70, 5)).double()
    return model, randn(8, 6, dtype=torch.float64), torch.arange(8) % 5


def scale(module: MyScale, x: Tensor, grad: Tensor, num: int) -> Any:
    return {"weight": cdgrab.factors.Rows((grad * x).reshape(num, -1, module.features).sum(1))}


class LinearOfMine(cdgrab.LayerAdapter):
    takes_flattened = True

    def matrices(self, module: MyLinear) -> tuple[str, ...]:  # noqa: ARG002
        return ("weight",)

    def check(self, name: str, module: MyLinear) -> None:
        if module.out_features == 1:
            raise ValueError(f"layer {name!r} has one output; give it two")

    def factors(self, module: MyLinear, x: Tensor, grad: Tensor, num: int) -> Any:  # noqa: ARG002
        a, b = cdgrab.factors.by_example(x, num), cdgrab.factors.by_example(grad, num)
        return {"weight": cdgrab.factors.Matrix(a, b), "bias": cdgrab.factors.Summed(b)}


class Again(cdgrab.LayerAdapter):
    runs_again = True

    def factors_again(self, module: MyScale, args: Any, kwargs: Any, grads: Any, num: int) -> Any:  # noqa: ARG002
        with torch.enable_grad():
            rows = [torch.autograd.grad(module(args[0][i]), module.weight, grads[0][i])[0] for i in range(num)]
        return {"weight": cdgrab.factors.Rows(torch.stack(rows))}


@pytest.mark.parametrize("adapter", [scale, Again])
def test_rows_are_those_of_per_example_grads(adapter: Any) -> None:
    model, x, y = data()
    cdgrab.register_layer(MyScale)(adapter)
    cdgrab.register_layer(MyLinear)(LinearOfMine)
    torch.testing.assert_close(rows_of(model, x, y), cdgrab.per_example_grads(model, cross_entropy, x, y))


def plan(model: nn.Module) -> list[list[str]]:
    lines = cdgrab.Ordering(8, batch_size=4).explain(model, torch.zeros(4, 6, dtype=torch.float64), length=16)
    return [line.split() for line in lines.splitlines()[1:4]]


def test_the_plan_and_sketches_follow() -> None:
    model, x, y = data()
    assert [line[5:7] for line in plan(model)] == [["runs", "once"], ["runs", "once"], ["spread", "and"]]
    cdgrab.register_layer(MyScale)(scale)
    cdgrab.register_layer(MyLinear)(LinearOfMine)
    assert [line[5:] for line in plan(model)] == [["folded"], ["spread", "and", "folded"], ["spread", "and", "folded"]]
    short, rows = rows_of(model, x, y, source="sketch"), rows_of(model, x, y)
    torch.testing.assert_close(short @ short.T, rows @ rows.T)  # as long as the gradient: nothing is lost


def test_a_registration_replaces_the_one_before_for_this_class_only() -> None:
    model, x, y = data()
    calls: list[int] = []

    @cdgrab.register_layer(nn.Linear)
    def counted(module: nn.Linear, x: Tensor, grad: Tensor, num: int) -> Any:  # noqa: ARG001
        calls.append(module.out_features)
        return {"weight": cdgrab.factors.Matrix(x[:, None], grad[:, None]), "bias": cdgrab.factors.Rows(grad)}

    torch.testing.assert_close(rows_of(model, x, y), cdgrab.per_example_grads(model, cross_entropy, x, y))
    assert calls == [5]  # of the last layer, not of the subclass


def test_refusals_are_said_at_the_start() -> None:
    cdgrab.register_layer(MyLinear)(LinearOfMine)
    with pytest.raises(ValueError, match="layer '0' has one output; give it two"):
        rows_of(nn.Sequential(MyLinear(6, 1)), randn(4, 6), torch.arange(4), strict=True)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"wieght": cdgrab.factors.Rows(torch.ones(8, 6))}, r"returned the keys 'wieght'; expected .* \(weight\)"),
        ({"weight": cdgrab.factors.Rows(torch.ones(8, 7))}, "for 8 examples x 7 numbers; expected 8 x 6"),
        ({"weight": cdgrab.factors.Summed(torch.ones(4, 2, 6))}, "for 4 examples x 6 numbers; expected 8 x 6"),
        (torch.ones(8, 6), "returned a Tensor; expected a dict of factors"),
        ({}, "0.weight cannot be balanced: no watched layer uses it"),
    ],
)
def test_factors_that_do_not_fit(found: Any, message: str) -> None:
    model, x, y = data()
    cdgrab.register_layer(MyScale)(lambda module, x, grad, num: found)
    with pytest.raises(ValueError, match=message):
        rows_of(model, x, y, strict=True)


def test_layers_with_another_signature() -> None:
    cdgrab.register_layer(nn.LSTM)(scale)
    model = nn.Sequential(nn.LSTM(6, 5, batch_first=True))
    with pytest.raises(ValueError, match=r"layer '0' \(LSTM\) takes a Tensor and returns a tuple; .* runs_again"):
        rows_of(model, randn(4, 3, 6), torch.arange(4))


def test_what_cannot_be_registered() -> None:
    register: Any = cdgrab.register_layer
    with pytest.raises(ValueError, match=r"was given <function scale.*; expected classes: @register_layer\(MyLayer\)"):
        register(scale)
    with pytest.raises(ValueError, match="was given None; expected classes"):
        register()
    for wrong in (sum, MyScale, 3):
        with pytest.raises(ValueError, match=r"decorates .*; expected a function \(module, x, grad, num\), or"):
            register(MyScale)(wrong)

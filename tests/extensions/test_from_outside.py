"""A rule, a layer, an exchange and a source, each added from outside the package: short, and by public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import cdgrab
from _inputs import randn
from _models import one_by_one, rows_of
from cdgrab import Ordering
from cdgrab.sources import GradientSource, PerExampleSource
from distributed._ranks import run_ranks
from extensions.exchange import BySum
from extensions.layer import Scaling
from extensions.rule import Lazy
from extensions.source import OneLayer

X, Y = randn(24, 6, dtype=torch.float64), torch.arange(24) % 3
MODULES = (cdgrab, cdgrab.sources, cdgrab.factors, cdgrab.exchange)


@pytest.mark.parametrize("name", ["rule", "layer", "exchange", "source"])
def test_extensions_are_short_and_use_public_names(name: str) -> None:
    text = (Path(__file__).parent / f"{name}.py").read_text()
    assert len(text.splitlines()) < 40
    public = {module.__name__: module.__all__ for module in MODULES}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cdgrab"):
            assert {alias.name for alias in node.names} <= set(public[str(node.module)])
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert isinstance(node.value, ast.Name)
            assert node.value.id == "self"


def test_a_rule() -> None:
    def flipped(rule: cdgrab.RuleMaker | str) -> float:
        ordering = Ordering(200, batch_size=4, unit_size=1, rule=rule)
        for rows in randn(200, 5).split(4):
            ordering.observe(rows)
        return ordering.metrics()["flipped"]

    assert flipped(lambda rng: Lazy(rng, slack=1e9)) == 0
    assert flipped(lambda rng: Lazy(rng, slack=0.0)) == flipped("greedy")
    assert 0 < flipped(Lazy) < flipped("greedy")


def test_a_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 5), Scaling(5), nn.Linear(5, 3)).double()
    torch.testing.assert_close(rows_of(model, X, Y), one_by_one(model, X, Y))


def order_on_ranks() -> tuple[list[int], list[int], float]:
    """The order that gathered rows make, the one of the exchange from outside, and what that has sent."""
    orders, sent = [], 0.0
    for exchange in ("gather", BySum):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(6, 3).double())
        ordering = Ordering(len(X), batch_size=4 // dist.get_world_size(), unit_size=1, exchange=exchange)
        ordering.attach(model, source="per_example")
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
            cross_entropy(model(X[batch]), Y[batch]).backward()
        orders.append(ordering.order.tolist())
        sent = ordering.metrics()["bytes"]
    return orders[0], orders[1], sent


def test_an_exchange() -> None:
    for gathered, summed, sent in run_ranks(2, order_on_ranks):
        assert summed == gathered
        assert sent > 0


def test_a_source() -> None:
    def order(source: GradientSource) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3, bias=False)).double()
        ordering = Ordering(len(X), batch_size=4, unit_size=1)
        ordering.attach(model, source=source)
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[:4])
            cross_entropy(model(X[batch]), Y[batch]).backward()
        ordering.detach()
        return ordering.order.tolist()

    assert order(OneLayer("0")) == order(PerExampleSource())

"""Gradients of single examples on real ranks: with every exchange the orders of the simulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from _inputs import randn
from cdgrab import Ordering, World
from distributed._ranks import run_ranks

X, Y = randn(26, 6, dtype=torch.float64), torch.arange(26) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def epochs(ordering: Ordering, model: nn.Module, source: str, per_step: int) -> list[list[list[int]]]:
    """Orders of all local workers after each of three epochs, without training: gradients stay as they are."""
    ordering.attach(model, source=source, length=32)
    orders = []
    for _ in range(3):
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            batch = torch.from_numpy(ordering.remaining()[:per_step])
            cross_entropy(model(X[batch]), Y[batch]).backward()
        orders.append([order.tolist() for order in ordering.orders])
    return orders


def on_a_rank(exchange: str | None, source: str) -> list[list[list[int]]]:
    ordering = Ordering(26, batch_size=2, unit_size=1, exchange=exchange)
    return epochs(ordering, DistributedDataParallel(net()), source, 2)


@pytest.mark.parametrize(("exchange", "source"), [("sharded", "per_example"), (None, "sketch"), ("server", "sketch")])
def test_orders_are_those_of_the_simulation(exchange: str | None, source: str) -> None:
    size = 3
    ranks = run_ranks(size, on_a_rank, exchange, source)
    alone = Ordering(26, batch_size=2 * size, unit_size=1, world=World.simulated(size))
    expected = epochs(alone, net(), source, 2 * size)
    for epoch in range(3):
        assert [orders[epoch][0] for orders in ranks] == expected[epoch]


def sharded_sketches() -> tuple[str, str]:
    ordering = Ordering(26, batch_size=2, unit_size=1)
    ordering.attach(DistributedDataParallel(net()), source="sketch")
    form = ordering._intake.form  # how they travel by default
    ordering.detach()
    other = Ordering(26, batch_size=2, unit_size=1, exchange="sharded")
    with pytest.raises(ValueError, match="sketches are short") as error:
        other.attach(DistributedDataParallel(net()), source="sketch")
    return form, str(error.value)


def test_sketches_are_gathered() -> None:
    for form, error in run_ranks(2, sharded_sketches):
        assert form == "sketches of 1024 numbers (exchange 'gather')"
        assert "leave exchange= out, or make the ordering with 'gather'" in error

"""Gradients of single examples on real ranks: with every exchange the orders of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from _inputs import randn
from _models import source_of
from cdgrab import Ordering
from distributed._ranks import run_ranks

X, Y = randn(26, 6, dtype=torch.float64), torch.arange(26) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def epochs(ordering: Ordering, model: nn.Module, source: str, per_step: int) -> list[list[list[int]]]:
    """Orders of the lanes of this process after each of three epochs, without training: gradients stay as they are."""
    ordering.attach(model, source=source_of(source, 32))
    orders = []
    for _ in range(3):
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            batch = torch.from_numpy(ordering.remaining()[:per_step])
            cross_entropy(model(X[batch]), Y[batch]).backward()
        orders.append([order.tolist() for order in ordering.orders])
    return orders


def on_a_rank(exchange: str | None, source: str) -> list[list[list[int]]]:
    ordering = Ordering(26, batch_size=8 // dist.get_world_size(), unit_size=1, exchange=exchange)
    return epochs(ordering, DistributedDataParallel(net()), source, ordering.batch_size)


@pytest.mark.parametrize(("exchange", "source"), [("sharded", "per_example"), (None, "sketch"), ("server", "sketch")])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_orders_are_the_same_on_any_number_of_ranks(size: int, exchange: str | None, source: str) -> None:
    ranks = run_ranks(size, on_a_rank, exchange, source)
    expected = epochs(Ordering(26, batch_size=8, unit_size=1), net(), source, 8)
    for epoch in range(3):
        assert [ranks[lane % size][epoch][lane // size] for lane in range(8)] == expected[epoch]


def other_forms() -> tuple[list[str], int, list[float]]:
    """How rows travel with one source after the other, process groups that come, and bytes of an epoch."""
    ordering, model = Ordering(8, batch_size=2, unit_size=1), DistributedDataParallel(net())
    known: Any = dist.distributed_c10d._world
    groups, forms, sent = len(known.pg_map), [], []
    for source in ("sketch", "per_example", "sketch"):
        ordering.attach(model, source=source)
        forms.append(ordering._epochs.intake.form)
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            batch = torch.from_numpy(ordering.remaining()[:2])
            cross_entropy(model(X[batch]), Y[batch]).backward()
        sent.append(ordering.metrics()["bytes"])
        ordering.detach()
    groups = len(known.pg_map) - groups
    other = Ordering(26, batch_size=2, unit_size=1, exchange="sharded")
    for _ in range(2):
        with pytest.raises(
            ValueError, match="'sharded' is for whole rows, and sketches are short; leave exchange= out"
        ):
            other.attach(model, source="sketch")
    assert other._epochs.intake.form == "rows (exchange 'sharded')"
    return forms, groups, sent


def test_sketches_are_gathered() -> None:
    for forms, groups, (first, whole, again) in run_ranks(2, other_forms):
        sketches = "sketches of 1024 numbers (exchange 'gather')"
        assert forms == [sketches, "rows (exchange 'sharded')", sketches]
        assert groups == 0
        assert first == again > 0
        assert whole > 0


def other_lengths() -> str:
    ordering = Ordering(8, batch_size=2, unit_size=1)
    with pytest.raises(ValueError, match="length") as error:
        ordering.attach(DistributedDataParallel(net()), source="sketch", length=64 << dist.get_rank())
    return str(error.value)


def test_ranks_that_disagree_on_the_length_are_told() -> None:
    for error in run_ranks(2, other_lengths):
        assert "64" in error
        assert "128" in error

"""Sketches of several steps that are observed together, as on a GPU: nothing but the time it takes depends on it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from _models import build
from cdgrab import Ordering, World


def nothing(ordering: Ordering, step: int) -> None:
    pass


def train(
    together: int,
    monkeypatch: pytest.MonkeyPatch,
    after: Callable[[Ordering, int], None] = nothing,
    resume_at: int | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Orders of four epochs of five batches, the last of each a short one; and of how many steps rows came at once."""
    monkeypatch.setattr(Ordering, "_steps_together", lambda self, rows: together)
    came: list[int] = []
    observe = Ordering._observe

    def noted(self: Ordering, rows: torch.Tensor, units: torch.Tensor | None = None) -> None:
        came.append(len(rows) if rows.ndim == 3 else 1)
        observe(self, rows, units)

    monkeypatch.setattr(Ordering, "_observe", noted)
    model, x, y = build("mlp", 26)

    def attached() -> Ordering:
        ordering = Ordering(len(x), batch_size=6, unit_size=1, world=World.simulated(3), seed=1)
        ordering.attach(model, source="sketch", length=60)
        return ordering

    ordering = attached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    orders, step = [], 0
    for epoch in range(4):
        ordering.sampler.set_epoch(epoch)
        for batch in torch.tensor(list(ordering.sampler)).split(6):
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            after(ordering, step)
            step += 1
            if step == resume_at:
                state = ordering.state_dict()
                ordering.detach()
                ordering = attached()
                ordering.load_state_dict(state)
        orders.append(ordering.order.tolist())
    monkeypatch.undo()
    return orders, came


@pytest.mark.parametrize("together", [2, 3, 4, 50])
def test_orders_are_the_same(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, one_by_one = train(1, monkeypatch)
    found, came = train(together, monkeypatch)
    assert found == expected
    assert one_by_one == [1] * 20
    assert max(came) == min(together, 4)
    assert sum(came) == 20


def test_whoever_asks_gets_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    expected, _ = train(1, monkeypatch)
    found, came = train(3, monkeypatch, after=lambda ordering, step: left.append(ordering.examples_left))
    assert found == expected
    assert left == [21, 15, 9, 3, 27] * 4
    assert came == [1] * 20


def test_an_epoch_ends_with_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when somebody asks."""
    monkeypatch.setattr(Ordering, "_steps_together", lambda self, rows: 50)
    model, x, y = build("mlp", 24)
    ordering = Ordering(24, batch_size=6, unit_size=1, world=World.simulated(3))
    ordering.attach(model, source="sketch", length=60)
    epochs = []
    for batch in torch.arange(24).split(6):
        cross_entropy(model(x[batch]), y[batch]).backward()
        epochs.append(ordering._epoch)
    assert epochs == [0, 0, 0, 1]


@pytest.mark.parametrize("at", [7, 8, 14])
def test_what_is_held_is_part_of_the_state(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train(1, monkeypatch)
    found, _ = train(3, monkeypatch, resume_at=at)
    assert found == expected


def test_how_many_steps_come_together() -> None:
    """As many as are balanced at a time: 2^20 numbers of short rows, where a call takes a GPU's time."""

    def steps(rows: Any, **how: Any) -> int:
        ordering = Ordering(1000, batch_size=32, unit_size=1, **how)
        return ordering._steps_together(rows)

    there = SimpleNamespace(is_cuda=True, shape=(32, 1000))
    assert steps(there, world=World.simulated(32)) == 32
    assert steps(there, world=World.simulated(8)) == (2**20 // 8000 // 2 * 2) // 4
    assert steps(there) == 1024 // 32
    assert steps(SimpleNamespace(is_cuda=True, shape=(32, 1 << 16)), world=World.simulated(32)) == 1
    assert steps(there, world=World.simulated(32), order="rr") == 1
    assert steps(there, world=World(rank=0, size=2)) == 1
    assert steps(torch.zeros(32, 1000), world=World.simulated(32)) == 1

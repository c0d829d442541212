from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from _inputs import randn
from cdgrab import Ordering, World, flat_grad
from cdgrab.sources.layout import Layout

DATA = TensorDataset(randn(46, 4), torch.arange(46) % 3)


def train(*, attached: bool, unit_size: int = 4, epochs: int = 3) -> tuple[list[list[int]], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ordering = Ordering(DATA, batch_size=4, unit_size=unit_size)
    if attached:
        ordering.attach(model)
    accumulate = ordering.unit_size // 4
    orders = []
    for _ in range(epochs):
        loader = DataLoader(DATA, batch_size=4, sampler=ordering.sampler)
        for step, (x, y) in enumerate(loader, start=1):
            nn.functional.cross_entropy(model(x), y).backward()
            if step % accumulate == 0 or step == len(loader):
                if not attached:
                    ordering.observe(flat_grad(model))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model(x)  # evaluation is not observed
        orders.append(ordering.order.tolist())
    return orders, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_attached_and_by_hand_are_the_same() -> None:
    attached, by_hand = train(attached=True), train(attached=False)
    assert attached[0] == by_hand[0]
    assert torch.equal(attached[1], by_hand[1])


def test_units_of_several_batches() -> None:
    assert train(attached=True, unit_size=4, epochs=2)[0] != train(attached=False, unit_size=8, epochs=2)[0]
    by_hand = train(attached=False, unit_size=8, epochs=2)
    assert len(by_hand[0][0]) == 40


def test_detach_stops_observing() -> None:
    model, ordering = nn.Linear(4, 3), Ordering(DATA, batch_size=4, unit_size=4)
    ordering.attach(model)
    model(DATA.tensors[0][:4]).sum().backward()
    assert ordering.examples_left == 42
    ordering.detach()
    model(DATA.tensors[0][:4]).sum().backward()
    assert ordering.examples_left == 42
    ordering.observe(flat_grad(model))
    assert ordering.examples_left == 38
    with pytest.raises(ValueError, match="the ordering is not attached to a model"):
        ordering.detach()


def test_orders_without_gradients_count_backward_passes() -> None:
    model, ordering = nn.Linear(4, 3), Ordering(DATA, batch_size=4, unit_size=4, order="rr")
    ordering.attach(model)
    for x, _ in DataLoader(DATA, batch_size=4, sampler=ordering.sampler):
        model(x).sum().backward()
    assert ordering.epoch == 1


def test_what_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="the model has no trainable parameter"):
        Ordering(DATA, batch_size=4, unit_size=4).attach(nn.ReLU())
    with pytest.raises(ValueError, match="source 'sketch' gives gradients of single examples, but unit_size is 2"):
        Ordering(DATA, batch_size=4, unit_size=2).attach(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="Linear is not wrapped, but there are 2 ranks"):
        Ordering(DATA, batch_size=4, unit_size=4, world=World(0, 2)).attach(nn.Linear(4, 3))


def test_a_layout_gives_every_coordinate_one_owner() -> None:
    layout = Layout([5, 7, 1, 12], [(2, 0), (1,), (3,)], num_ranks=3)
    held = torch.cat([layout.coordinates(rank) for rank in range(3)])
    assert sorted(held.tolist()) == list(range(25))
    for rank in range(3):
        assert (layout.owners()[layout.coordinates(rank)] == rank).all()

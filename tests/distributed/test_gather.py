"""Real ranks and the one-process simulation must find the same orders."""

from __future__ import annotations

import pytest

from _inputs import randn
from cdgrab import Ordering, World
from distributed._ranks import run_ranks

LENGTH, DIM, EPOCHS = 43, 7, 3


def observe_all(ordering: Ordering) -> list[list[list[int]]]:
    vectors = randn(LENGTH, DIM)
    orders = []
    for epoch in range(EPOCHS):
        while ordering.epoch == epoch:
            batch = ordering.remaining().tolist()[: ordering.batch_size]
            ordering.observe(vectors[batch])
        orders.append([order.tolist() for order in ordering.orders])
    return orders


def on_a_rank(order: str, rule: str) -> list[list[list[int]]]:
    return observe_all(Ordering(LENGTH, batch_size=2, unit_size=1, order=order, rule=rule, seed=3))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_the_orders_of_the_simulation(size: int) -> None:
    for order, rule in (("cd-grab", "greedy"), ("grab", "walk"), ("id-grab", "halving")):
        world = World.simulated(size)
        expected = observe_all(
            Ordering(LENGTH, batch_size=2 * size, unit_size=1, order=order, rule=rule, world=world, seed=3)
        )
        answers = run_ranks(size, on_a_rank, order, rule)
        for epoch in range(EPOCHS):
            assert [answer[epoch][0] for answer in answers] == expected[epoch]

from __future__ import annotations

import pytest

from cdgrab import ORDERS, World
from cdgrab.balancing.rules import RuleMaker
from cdgrab.exchange import Local
from cdgrab.settings import Settings


def settings(
    *,
    order: str = "cd-grab",
    world: World | None = None,
    batch_size: int = 12,
    unit_size: int | None = 1,
    rule: str | RuleMaker = "greedy",
    drop_last: bool = False,
) -> Settings:
    return Settings.checked(
        50,
        batch_size=batch_size,
        unit_size=unit_size,
        order=order,
        rule=rule,
        world=world or World(),
        seed=3,
        drop_last=drop_last,
        block=None,
        group=None,
    )


@pytest.mark.parametrize(
    ("world", "together", "alone"),
    [
        (World(), range(1), range(1)),
        (World.simulated(3), range(3), range(3)),
        (World(2, 3), range(3), range(2, 3)),
    ],
    ids=["one", "simulated", "rank"],
)
def test_rows_come_from_all_workers_that_decide_together(world: World, together: range, alone: range) -> None:
    for order in ORDERS:
        coordinated = order in ("cd-grab", "grab", "greedy-herding")
        made = settings(order=order, world=world)
        assert made.coordinated == coordinated
        assert made.sorted_workers == (together if coordinated else alone)


@pytest.mark.parametrize(
    ("world", "unit_size", "turns"),
    [(World(), 1, 12), (World(1, 3), 4, 3), (World.simulated(3), 1, 4), (World.simulated(3), 2, 2), (World(), 24, 1)],
)
def test_turns_are_units_of_a_worker(world: World, unit_size: int, turns: int) -> None:
    assert settings(world=world, unit_size=unit_size).turns_per_batch == turns


@pytest.mark.parametrize("order", ORDERS)
def test_only_an_order_that_says_so_is_dealt_anew(order: str) -> None:
    made = settings(order=order, world=World.simulated(3))
    dealt = [made.deal(epoch).dealt.tolist() for epoch in (0, 1)]
    assert (dealt[0] != dealt[1]) == (order == "global-rr")


def test_visits_are_the_same_in_every_epoch() -> None:
    made = settings(order="global-rr", world=World.simulated(4), unit_size=3, drop_last=True)
    for epoch in range(3):
        assert made.deal(epoch).visits(made.sorted_workers).tolist() == [4, 4, 4, 4]


def test_without_other_ranks_nothing_is_exchanged() -> None:
    for world in (World(), World(1, 3), World.simulated(3)):
        made = settings(world=world)
        assert not made.ranks_meet
        exchange, group = made.make_exchange(None)
        assert isinstance(exchange, Local)
        assert group is None

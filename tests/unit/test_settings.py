from __future__ import annotations

import pytest

from cdgrab import ORDERS, World
from cdgrab.balancing.rules import RuleMaker
from cdgrab.exchange import Local
from cdgrab.exchange.connection import Connection
from cdgrab.settings import Settings


def settings(
    *,
    order: str = "cd-grab",
    world: World | None = None,
    batch_size: int = 12,
    unit_size: int | None = 1,
    lanes: int | None = None,
    rule: str | RuleMaker = "greedy",
    drop_last: bool = False,
) -> Settings:
    return Settings.checked(
        50,
        batch_size=batch_size,
        unit_size=unit_size,
        lanes=lanes,
        order=order,
        rule=rule,
        world=world or World(),
        seed=3,
        drop_last=drop_last,
        block=None,
        group=None,
    )


@pytest.mark.parametrize(
    ("world", "lanes", "together", "alone"),
    [
        (World(), 1, range(1), range(1)),
        (World(), 3, range(3), range(3)),
        (World(2, 3), 3, range(3), range(2, 3)),
        (World(1, 3), 12, range(12), range(1, 12, 3)),
    ],
)
def test_rows_come_from_all_lanes_that_decide_together(world: World, lanes: int, together: range, alone: range) -> None:
    for order in ORDERS:
        coordinated = order in ("cd-grab", "grab", "greedy-herding")
        made = settings(order=order, world=world, lanes=lanes)
        assert made.coordinated == coordinated
        assert made.sorted_lanes == (together if coordinated else alone)


@pytest.mark.parametrize(
    ("world", "unit_size", "lanes"),
    [
        (World(), 1, 12),
        (World(1, 3), 1, 36),
        (World(1, 3), 4, 9),
        (World(), 12, 1),
        (World(), 24, 1),
        (World(1, 3), None, 36),
    ],
)
def test_by_default_every_unit_of_the_global_batch_has_a_lane(world: World, unit_size: int | None, lanes: int) -> None:
    made = settings(world=world, unit_size=unit_size)
    assert made.lanes == lanes == made.units_per_batch * world.size


@pytest.mark.parametrize("lanes", [1, 3, 6, 12])
def test_fewer_lanes_are_shared_out_among_ranks(lanes: int) -> None:
    assert list(settings(lanes=lanes).local_lanes) == list(range(lanes))
    assert list(settings(lanes=3 * lanes, world=World(1, 3)).local_lanes) == list(range(1, 3 * lanes, 3))


@pytest.mark.parametrize(("world", "lanes"), [(World(), 5), (World(), 24), (World(1, 3), 4), (World(1, 3), 15)])
def test_lanes_that_do_not_fit_a_batch_are_refused(world: World, lanes: int) -> None:
    fitting = [world.size * each for each in (1, 2, 3, 4, 6, 12)]
    with pytest.raises(ValueError, match=f"lanes is {lanes}, but .* choose one of {', '.join(map(str, fitting))}"):
        settings(world=world, lanes=lanes)


@pytest.mark.parametrize("order", ORDERS)
def test_only_an_order_that_says_so_is_dealt_anew(order: str) -> None:
    made = settings(order=order, lanes=3)
    dealt = [made.deal(epoch).shard.tolist() for epoch in (0, 1)]
    assert (dealt[0] != dealt[1]) == (order == "global-rr")


def test_visits_are_the_same_in_every_epoch() -> None:
    made = settings(order="global-rr", lanes=4, unit_size=3, drop_last=True)
    for epoch in range(3):
        assert made.deal(epoch).visited_L.tolist() == [4, 4, 4, 4]


def test_without_other_ranks_nothing_is_exchanged() -> None:
    for world in (World(), World(1, 3)):
        made = settings(world=world)
        assert not made.ranks_meet
        connection = Connection(made, None)
        assert isinstance(connection.exchange, Local)
        assert connection.group is None

from __future__ import annotations

import numpy as np
import pytest
import torch

from _asserts import assert_permutation
from cdgrab import ORDERS, Ordering
from cdgrab.orders import Free, find_order
from cdgrab.orders.baselines import block_reversal, flip_flop, reshuffled

FREE = [name for name, spec in ORDERS.items() if isinstance(spec, Free)]


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("num_units", [0, 1, 2, 17, 100])
def test_permutation_and_repeatable(name: str, num_units: int) -> None:
    spec = ORDERS[name]
    assert isinstance(spec, Free)
    for epoch in range(5):
        order = spec.baseline(num_units, 3, epoch, 1)
        assert_permutation(order, range(num_units))
        np.testing.assert_array_equal(order, spec.baseline(num_units, 3, epoch, 1))


def test_reshuffling_differs_between_epochs_workers_and_seeds() -> None:
    orders = [
        reshuffled(50, seed, epoch, worker).tolist() for seed in (0, 1) for epoch in (1, 2, 3) for worker in (0, 1, 2)
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("baseline", [flip_flop, block_reversal])
def test_odd_epochs_run_backwards(baseline) -> None:  # type: ignore[no-untyped-def]
    for epoch in (0, 2, 4):
        np.testing.assert_array_equal(baseline(30, 0, epoch + 1, 0), baseline(30, 0, epoch, 0)[::-1])
    assert not np.array_equal(baseline(30, 0, 0, 0), baseline(30, 0, 2, 0))


def test_blocks_stay_together() -> None:
    order = block_reversal(30, 0, 2, 0)
    blocks = np.array_split(np.arange(30), 5)
    assert {frozenset(part.tolist()) for part in order.reshape(5, 6)} == {frozenset(b.tolist()) for b in blocks}


def test_lanes_draw_different_permutations() -> None:
    ordering = Ordering(40, batch_size=4, unit_size=1, order="rr", lanes=4)
    ordering.set_epoch(1)
    assert len({tuple(order.tolist()) for order in ordering.orders}) == 4


@pytest.mark.parametrize("length", [40, 38, 37])
def test_lanes_that_share_a_permutation_keep_the_units_of_a_step(length: int) -> None:
    ordering = Ordering(length, batch_size=4, unit_size=1, order="shared-rr", lanes=4)
    dealt = [lane.tolist() for lane in ordering.orders]
    seen = []
    for epoch in (1, 2, 3):
        ordering.set_epoch(epoch)
        turns = [
            [mine.index(unit) for unit in lane.tolist()] for mine, lane in zip(dealt, ordering.orders, strict=True)
        ]
        common = [[turn for turn in lane if turn < length // 4] for lane in turns]  # some lanes have one unit more
        assert common == [common[0]] * 4
        assert_permutation(common[0], range(length // 4))
        seen.append(tuple(common[0]))
    assert len(set(seen)) == 3


@pytest.mark.parametrize("length", [40, 38, 37, 9])
def test_all_plus_is_balancing_without_differences(length: int) -> None:
    plus, balanced = (
        Ordering(length, batch_size=4, unit_size=1, order=order, lanes=4) for order in ("all-plus", "cd-grab")
    )
    for _ in range(7):
        assert plus.remaining().tolist() == balanced.remaining().tolist()
        for rows in torch.zeros(length, 3).split(4):
            balanced.observe(rows)
        plus.set_epoch(plus.epoch + 1)


def test_unknown_order_is_named() -> None:
    with pytest.raises(
        ValueError, match="unknown order 'cdgrab'; choose one of rr, shared-rr, global-rr, shuffle-once"
    ):
        find_order("cdgrab")

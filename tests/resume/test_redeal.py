"""Another global batch: the sequence of all examples is dealt anew."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from _asserts import assert_permutation
from _inputs import randn
from cdgrab import Ordering, World, herding_bound


def trained(vectors: torch.Tensor, batch: int, epochs: int, **options: Any) -> Ordering:
    ordering = Ordering(len(vectors), batch_size=batch, **{"unit_size": 1, **options})
    while ordering.epoch < epochs:
        ordering.observe(vectors[ordering.remaining()[: ordering.batch_size]])
    return ordering


def on(size: int, batch: int, length: int, state: dict[str, Any], **options: Any) -> list[Ordering]:
    """Orderings of so many ranks, which have loaded a state."""
    made = [
        Ordering(length, batch_size=batch, world=World(rank, size), **{"unit_size": 1, **options})
        for rank in range(size)
    ]
    for ordering in made:
        ordering.load_state_dict(state)
    return made


def bound(vectors: torch.Tensor, sequence: np.ndarray[Any, Any]) -> float:
    return herding_bound(vectors[torch.from_numpy(sequence)][None])


def together(orderings: list[Ordering]) -> np.ndarray[Any, Any]:
    """The examples that are left, in the order in which all ranks visit them."""
    return np.stack([ordering.remaining() for ordering in orderings], axis=1).reshape(-1)


@pytest.mark.parametrize(("before", "size", "batch"), [(8, 2, 4), (8, 2, 2), (8, 2, 3), (64, 4, 12), (64, 6, 2)])
def test_the_bound_is_at_most_twice_that_of_the_saved_order(before: int, size: int, batch: int) -> None:
    vectors = randn(1536, 16)
    saved = trained(vectors, before, 8)
    dealt = on(size, batch, 1536, saved.state_dict())
    sequence = together(dealt)
    assert_permutation(sequence, range(1536))
    found, was = bound(vectors, sequence), bound(vectors, saved.remaining())
    shuffled = bound(vectors, np.random.default_rng(0).permutation(1536))
    assert found <= 2 * was
    assert found < shuffled / 2


def test_with_the_same_global_batch_nothing_is_dealt(caplog: pytest.LogCaptureFixture) -> None:
    vectors = randn(48, 4)
    saved = trained(vectors, 8, 2)
    saved.observe(vectors[saved.remaining()[:8]])
    for size in (1, 2, 4, 8):
        dealt = on(size, 8 // size, 48, saved.state_dict())
        assert together(dealt).tolist() == saved.remaining().tolist()
        orders = [order.tolist() for order in saved.orders]
        assert [order.tolist() for rank in range(size) for order in dealt[rank].orders] == [
            orders[lane] for rank in range(size) for lane in range(rank, 8, size)
        ]
    assert caplog.text == ""


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"batch_size": 8}, {"batch_size": 12}),
        ({"batch_size": 8}, {"batch_size": 5}),
        ({"batch_size": 8, "unit_size": 8}, {"batch_size": 4, "unit_size": 4}),
        ({"batch_size": 4, "unit_size": 4}, {"batch_size": 6, "unit_size": 6}),
        ({"batch_size": 6, "lanes": 2}, {"batch_size": 6, "lanes": 3}),
        ({"batch_size": 4, "order": "grab"}, {"batch_size": 6, "order": "grab"}),
        ({"batch_size": 4, "order": "id-grab", "rule": "walk"}, {"batch_size": 6, "order": "id-grab", "rule": "walk"}),
        ({"batch_size": 4, "order": "global-rr"}, {"batch_size": 6, "order": "global-rr"}),
    ],
)
def test_within_an_epoch_what_is_left_comes_once(
    before: dict[str, Any], after: dict[str, Any], drop_last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    length = 95
    vectors = randn(length, 4)

    def steps(ordering: Ordering, count: int) -> list[int]:
        seen = []
        for _ in range(count):
            batch = ordering.remaining()[: ordering.batch_size]
            seen += batch.tolist()
            ordering.observe(torch.stack([unit.mean(0) for unit in vectors[batch].split(ordering.unit_size)]))
        return seen

    for stop in (1, 2, 5, 7):
        saved = Ordering(length, **{"unit_size": 1, "drop_last": drop_last, **before})
        steps(saved, len(saved.remaining()) // saved.batch_size + 2)
        while saved.epoch < 2:
            steps(saved, 1)
        visited = steps(saved, stop)
        left = saved.remaining().tolist()
        resumed = Ordering(length, **{"unit_size": 1, "drop_last": drop_last, **after})
        resumed.load_state_dict(saved.state_dict())
        seen = []
        while resumed.epoch == 2:
            seen += steps(resumed, 1)
        new = [example for example in seen if example in set(left)]
        assert len(new) == len(set(new))
        assert set(seen).isdisjoint(visited) or drop_last
        assert len(left) - len(new) < (resumed.batch_size if drop_last else 1)
        assert len(resumed.order) == length // resumed.unit_size * resumed.unit_size
        assert len(np.unique(resumed.order)) == len(resumed.order)
    lines = [record.getMessage() for record in caplog.records if "dealt anew" in record.getMessage()]
    assert len(lines) == 4
    assert (
        f"with batches of {before['batch_size']} is dealt anew to 1 with batches of {after['batch_size']}" in lines[0]
    )


def test_signs_are_kept() -> None:
    """A unit with a plus comes in the first half of the next epoch, one with a minus in the second."""
    vectors = randn(240, 8)
    saved, straight = (trained(vectors, 8, 3) for _ in range(2))
    for ordering in (saved, straight):
        while len(ordering.remaining()) > 96:
            ordering.observe(vectors[ordering.remaining()[:8]])
    visited = set(range(240)) - set(saved.remaining().tolist())
    resumed = Ordering(240, batch_size=12, unit_size=1)
    resumed.load_state_dict(saved.state_dict())
    for ordering in (resumed, straight):
        while ordering.epoch == 3:
            ordering.observe(vectors[ordering.remaining()[: ordering.batch_size]])
    early = [visited & set(ordering.remaining()[:120].tolist()) for ordering in (resumed, straight)]
    assert early[0] == early[1]


def test_herding_within_an_epoch_cannot_be_dealt_anew() -> None:
    vectors = randn(24, 3)
    saved = trained(vectors, 4, 1, order="greedy-herding")
    other = Ordering(24, batch_size=6, unit_size=1, order="greedy-herding")
    other.load_state_dict(saved.state_dict())
    saved.observe(vectors[saved.remaining()[:4]])
    with pytest.raises(ValueError, match="taken within an epoch of 'greedy-herding' with another global batch"):
        other.load_state_dict(saved.state_dict())


def test_the_state_of_one_rank_is_not_that_of_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    alone = Ordering(24, batch_size=4, unit_size=1, world=World(1, 2)).rank_state_dict()
    with pytest.raises(ValueError, match="the state is that of rank 1 of 2, and this is rank 0 of 1; every rank must"):
        Ordering(24, batch_size=8, unit_size=1).load_state_dict(alone)
    with pytest.raises(ValueError, match="the state is that of rank 1 of 2, and this is rank 0 of 2"):
        Ordering(24, batch_size=4, unit_size=1, world=World(0, 2)).load_state_dict(alone)

"""A state that is not what was saved is refused in words, and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from _inputs import randn
from cdgrab import Ordering
from distributed._ranks import run_ranks
from resume._damage import around, edited, flipped, loads, truncated


def maker(**options: Any) -> Callable[[], Ordering]:
    return lambda: Ordering(45, **{"batch_size": 12, "unit_size": 1, "lanes": 2, **options})


def saved(make: Callable[[], Ordering], steps: int, *, named: bool = False) -> dict[str, Any]:
    ordering = make()
    for _ in range(steps):
        batch = ordering.remaining()[:12]
        ordering.observe(randn(len(batch), 3, seed=int(batch[0])), torch.from_numpy(batch) if named else None)
    return ordering.state_dict()


STATES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "rows wait, and are named": ({}, 6, True),
    "lanes for themselves": ({"order": "pair", "rule": "halving"}, 5, False),
    "means": ({"order": "id-grab", "rule": "walk"}, 6, False),
    "herding": ({"order": "greedy-herding"}, 6, False),
}


# Another state that might have been saved: no figures yet; a form or model whose rows are not needed; a running sum of
# which nothing has come.
POSSIBLE = ("'epoch') = -1", "'form')", "'model') = x", "'running_sum') = tensor([0., 0., 0.])")


@pytest.mark.parametrize("name", STATES)
def test_every_field_is_checked(name: str) -> None:
    options, steps, named = STATES[name]
    make = maker(**options)
    state = saved(make, steps, named=named)
    wrong = loads(make, edited(state))[1] + loads(make, around(state))[1]
    wrong = [text for text in wrong if not any(possible in text for possible in POSSIBLE)]
    assert not wrong, "\n".join(wrong)


def test_every_bit_counts() -> None:
    make, generator = maker(), random.Random(0)
    state = saved(make, 6)
    damage: dict[str, Callable[..., dict[str, Any]]] = {"flip": flipped, "cut": truncated}

    def damaged() -> Iterator[tuple[str, Any]]:
        for kind, change in damage.items():
            yield from ((f"{kind} {number}", change(state, generator)) for number in range(300))

    found, wrong = loads(make, damaged())
    assert found == {"refused": 600}, "\n".join(wrong)


def damaged_slices() -> list[str]:
    """What is not refused of a state whose rows are slices, in the middle of a pair."""
    vectors = randn(40, 9)

    def make() -> Ordering:
        return Ordering(40, batch_size=2, unit_size=1, exchange="sharded")

    ordering = make()
    for _ in range(3):
        ordering.observe(vectors[ordering.remaining()[:2]])
    wrong = loads(make, edited(ordering.rank_state_dict()))[1]
    return [text for text in wrong if not any(possible in text for possible in POSSIBLE)]


def test_every_field_of_slices_is_checked() -> None:
    assert run_ranks(2, damaged_slices) == [[], []]


def test_errors_name_the_field() -> None:
    make = maker()
    ordering, texts = make(), []
    for _, other in edited(saved(make, 6)):
        try:
            ordering.load_state_dict(other)
        except ValueError as error:
            texts.append(str(error))
    for part in (
        "is damaged: epoch is 'x', expected a whole number from 0 on; load another checkpoint",
        "is damaged: parts.0.progress.rows is -1, expected a whole number from 0 to 44; load another checkpoint",
        "is damaged: parts.0.examples is a tensor of shape (44,) and type int8, expected a tensor of shape (45)",
        "is damaged: parts.0.sorter.balancers[0].running_sum is ",
        "is damaged: parts.0.metrics.imbalance is missing",
        "was saved with seed=-1, this ordering has seed=0",
    ):
        assert any(part in text for text in texts), part


def test_an_example_that_is_there_twice_is_noticed() -> None:
    from cdgrab.state import pack, unpack

    make = maker()
    content = unpack(saved(make, 2)).values
    content["parts"][0]["examples"][1] = content["parts"][0]["examples"][0]
    with pytest.raises(ValueError, match=r"examples has some of 45 examples twice"):
        make().load_state_dict(pack(content))

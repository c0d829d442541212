"""Whatever is saved, wherever it is saved: resuming leaves no trace."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from _inputs import randn
from cdgrab import ORDERS, Ordering

VECTORS = randn(45, 6)
STEPS_PER_EPOCH = 4
STOPS = {"start": 0, "one step": 1, "middle": 2, "last step": 3, "end of epoch": 4, "next epoch": 5, "later": 11}


def maker(length: int = 45, **options: Any) -> Callable[[], Ordering]:
    return lambda: Ordering(length, **{"batch_size": 12, "unit_size": 1, **options})


EVERY_ORDERING = {
    **{name: maker(order=name, lanes=4) for name in ORDERS},
    "pair, walk": maker(order="pair", rule="walk", lanes=4),
    "halving": maker(rule="halving", lanes=4),
    "one lane, small block": maker(lanes=1, block=5),
    "a lane for every slot": maker(),
    "units of three": maker(unit_size=3, block=1),
    "drop last": maker(49, drop_last=True),
}


def run(ordering: Ordering, steps: int, *, named: bool = False) -> list[Any]:
    """Train for some steps and record everything a user could see."""
    seen: list[Any] = []
    for _ in range(steps):
        batch = ordering.remaining().tolist()[: ordering.batch_size]
        rows = torch.stack([unit.mean(0) for unit in VECTORS[torch.tensor(batch) % 45].split(ordering.unit_size)])
        ordering.observe(rows * len(seen), torch.tensor(batch) if named else None)
        metrics = {key: value for key, value in ordering.metrics().items() if key != "seconds"}
        seen.append((batch, ordering.epoch, ordering.order.tolist(), str(metrics)))
    return seen


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("named", [False, True], ids=["in order", "named"])
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("name", EVERY_ORDERING)
def test_resume_leaves_no_trace(name: str, stop: int, named: bool) -> None:
    straight = EVERY_ORDERING[name]()
    run(straight, stop, named=named)
    state = through_a_file(straight.state_dict())
    expected = run(straight, 9, named=named)
    resumed = EVERY_ORDERING[name]()
    resumed.load_state_dict(state)
    # The rows depend on the step, so the count starts at the same number on both sides.
    assert run(resumed, 9, named=named) == expected


def test_a_state_is_a_copy() -> None:
    ordering = EVERY_ORDERING["cd-grab"]()
    run(ordering, 2)
    state = ordering.state_dict()
    before = str(state)
    run(ordering, 5)
    assert str(state) == before
    other = EVERY_ORDERING["cd-grab"]()
    other.load_state_dict(state)
    run(other, 5)
    assert str(state) == before


def test_keys_are_the_same_from_the_start() -> None:
    ordering = EVERY_ORDERING["cd-grab"]()

    def keys(state: Any) -> Any:
        return {key: keys(value) for key, value in state.items()} if isinstance(state, dict) else None

    start = ordering.state_dict()
    run(ordering, 3)
    middle = ordering.state_dict()
    assert keys(start) == keys(middle)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    straight, resumed = EVERY_ORDERING["cd-grab"](), EVERY_ORDERING["cd-grab"]()
    run(straight, 6)
    save({"ordering": straight.state_dict()}, checkpoint_id=tmp_path)
    loaded = {"ordering": resumed.state_dict()}
    load(loaded, checkpoint_id=tmp_path)
    resumed.load_state_dict(loaded["ordering"])
    assert run(resumed, 9) == run(straight, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "saved with seed=0, this ordering has seed=1"),
        ({"drop_last": True}, "saved with drop_last=False, this ordering has drop_last=True"),
        ({"order": "pair"}, "saved with order='cd-grab', this ordering has order='pair'"),
        ({"rule": "walk"}, "saved with rule='greedy', this ordering has rule='walk'"),
        ({"dataset": 44}, "saved with num_examples=45, this ordering has num_examples=44"),
    ],
)
def test_a_state_of_another_ordering_is_refused(options: dict[str, Any], message: str) -> None:
    saved = EVERY_ORDERING["cd-grab"]()
    run(saved, 3)
    arguments = {"dataset": 45, "batch_size": 12, "unit_size": 1, "lanes": 4, **options}
    ordering = Ordering(arguments.pop("dataset"), **arguments)
    before = str(ordering.state_dict())
    with pytest.raises(ValueError, match=message):
        ordering.load_state_dict(saved.state_dict())
    assert str(ordering.state_dict()) == before


@pytest.mark.parametrize("visits", [2, 3])
def test_rows_are_saved_only_while_they_wait_for_a_partner(visits: int) -> None:
    """Or every checkpoint of a large model would hold a gradient for every lane."""
    lanes, dim = 8, 40_000  # so long that rows are balanced as they come
    ordering = Ordering(64, batch_size=lanes, unit_size=1)
    for visit in range(visits):
        ordering.observe(randn(lanes, dim, seed=visit))
    row = 4 * dim
    held = len(ordering.state_dict()["payload"]) - row  # the running sum is there in any case
    assert (lanes * row <= held) if visits == 3 else (held < row)

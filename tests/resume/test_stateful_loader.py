"""Loaders that save a state of their own: whatever is restored, every example comes once, or an error says why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from _asserts import assert_permutation
from _inputs import randn
from cdgrab import Ordering

# Said by the loader of torchdata 0.11 with newer PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

VECTORS = randn(50, 4)
DATA = TensorDataset(torch.arange(50), VECTORS)


def loader_of(ordering: Ordering, workers: int) -> Any:
    return StatefulDataLoader(DATA, ordering.batch_size, sampler=ordering.sampler, num_workers=workers)


def made(order: str = "cd-grab") -> Ordering:
    return Ordering(50, batch_size=4, unit_size=1, order=order)


def steps(ordering: Ordering, loader: Any, count: int) -> Iterator[int]:
    """The examples of some steps, each of which is observed."""
    while count:
        for index, rows in loader:
            ordering.observe(rows)
            yield from index.tolist()
            count -= 1
            if not count:
                break


@pytest.mark.parametrize(
    ("stop", "workers"), [*((stop, 0) for stop in (0, 1, 7, 12, 13, 20)), (0, 2), (7, 2), (7, 4), (13, 2), (20, 2)]
)
@pytest.mark.parametrize("restored", ["ordering", "ordering, loader", "loader, ordering", "loader"])
def test_every_example_comes_once(restored: str, stop: int, workers: int) -> None:
    straight = made()
    loader = loader_of(straight, workers)
    before = list(steps(straight, loader, stop))
    states = {"ordering": straight.state_dict(), "loader": loader.state_dict()}
    resumed = made()
    again = loader_of(resumed, workers)
    for name in restored.split(", "):
        {"ordering": resumed, "loader": again}[name].load_state_dict(states[name])
    if restored == "loader" and stop:
        with pytest.raises(
            ValueError, match=rf"saved in epoch {stop // 13} .*ordering stands in epoch 0 after 0; load"
        ):
            next(iter(again))
        return
    seen: list[list[int]] = []
    for _ in range(2):  # the rest of the epoch, which is none if its last batch has been seen, and the next one
        for index, rows in again:
            resumed.observe(rows)
            seen.append(index.tolist())
    flat = before + [example for batch in seen for example in batch]
    for start in range(0, len(flat) - 49, 50):
        assert_permutation(flat[start : start + 50], range(50))
    assert len(flat) % 50 == 0
    assert flat[len(before) :] == list(steps(straight, loader, len(seen)))


def test_a_free_order_needs_no_state_but_that_of_the_loader() -> None:
    straight, resumed = made("rr"), made("rr")
    for ordering in (straight, resumed):
        ordering.set_epoch(2)
    loader, again = loader_of(straight, 2), loader_of(resumed, 2)
    iterator = iter(loader)
    before = [next(iterator)[0] for _ in range(5)]
    again.load_state_dict(loader.state_dict())
    rest = [index for index, _ in again]
    assert_permutation(torch.cat(before + rest), range(50))
    assert torch.equal(torch.cat(rest), torch.cat([index for index, _ in iterator]))


def test_the_state_of_a_sampler_is_small_and_does_not_move_it() -> None:
    ordering = made()
    sampler = ordering.sampler
    assert sampler.state_dict() == {"epoch": 0, "place": 0}
    given = iter(sampler)
    for place in range(1, 51):
        next(given)
        assert sampler.state_dict() == {"epoch": 0, "place": place}
    ordering.observe(VECTORS[ordering.remaining()[:4]])
    assert sampler.state_dict() == {"epoch": 0, "place": 50}
    sampler.load_state_dict({"epoch": 0, "place": 4})
    assert len(list(sampler)) == 46
    with pytest.raises(ValueError, match="the state is damaged: place is -1"):
        sampler.load_state_dict({"epoch": 0, "place": -1})

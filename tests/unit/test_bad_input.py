"""Every message names what was found, what is accepted, and what to do; and nothing was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from _inputs import randn
from cdgrab import Ordering, World, flat_grad, set_flat_grad


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, r"Stream is an iterable-style dataset.*pass a map-style dataset, with __getitem__ and __len__"),
        ([], {}, "the dataset has 0 examples; pass at least one"),
        (-3, {}, "the dataset has -3 examples"),
        (True, {}, "bool has no length; pass a map-style dataset"),
        (None, {}, "NoneType has no length"),
        (10, {"batch_size": 0}, "batch_size is 0; it must be a whole number, 1 or more"),
        (10, {"batch_size": 2.0}, r"batch_size is 2\.0; it must be a whole number"),
        (10, {"batch_size": True}, "batch_size is True"),
        (10, {"unit_size": 0}, "unit_size is 0; it must be a whole number"),
        (10, {"unit_size": 3}, "unit_size is 3, but a batch has 4 examples.*choose a divisor of 4"),
        (10, {"unit_size": 6}, "unit_size is 6, but a batch has 4 examples.*or a multiple if batches are"),
        (10, {"lanes": 3, "unit_size": 1}, "lanes is 3, but the 4 units of the global batch.*choose one of 1, 2, 4"),
        (10, {"lanes": 4, "unit_size": 4}, "lanes is 4, but the 1 units of the global batch.*or another unit_size"),
        (10, {"lanes": 0}, "lanes is 0; it must be a whole number"),
        (10, {"order": "cd_grab"}, "unknown order 'cd_grab'; choose one of rr, .*cd-grab"),
        (10, {"rule": "best"}, "unknown rule 'best'; choose one of greedy, walk, halving"),
        (10, {"seed": -1}, "seed is -1; it must be a whole number, 0 or more"),
        (10, {"seed": 1.5}, r"seed is 1\.5"),
        (10, {"block": 0}, "block is 0; it must be a whole number"),
    ],
)
def test_making_an_ordering(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ordering(dataset, **{"batch_size": 4, **options})


def state_of(ordering: Ordering) -> str:
    state = ordering.state_dict()
    return str(state)


@pytest.mark.parametrize(
    ("rows", "units", "message"),
    [
        (randn(4, 5), None, "rows have 5 columns, earlier ones had 3"),
        (randn(7, 3), None, "7 rows for a batch of 4 units; pass one row for every unit of 1 examples"),
        (randn(1, 3), None, "1 rows for a batch of 4 units"),
        (randn(0, 3), None, "0 rows for a batch of 4 units"),
        (randn(2, 2, 3), None, "4 rows for a batch of 6 units"),
        (randn(0, 2, 3), None, r"rows have the shape \(0, 2, 3\), which has no step"),
        (randn(2, 2, 3, 1), None, r"rows have the shape \(2, 2, 3, 1\).*expected units x dim"),
        (randn(2, 0), None, r"rows have the shape \(2, 0\)"),
        (randn(2, 3).to(torch.complex64), None, "type torch.complex64; expected units x dim real numbers"),
        (randn(2, 3), torch.tensor([1, 2]), "earlier rows came without units="),
    ],
)
def test_observing_in_order(rows: torch.Tensor, units: torch.Tensor | None, message: str) -> None:
    ordering = Ordering(10, batch_size=4, unit_size=1)
    ordering.observe(randn(4, 3))
    before = state_of(ordering)
    with pytest.raises(ValueError, match=message):
        ordering.observe(rows, units)
    assert state_of(ordering) == before


def test_rows_that_are_refused_say_nothing_of_others() -> None:
    ordering = Ordering(4, batch_size=2, unit_size=2)
    with pytest.raises(ValueError, match="3 rows"):
        ordering.observe(torch.zeros(3, 7, dtype=torch.float64))
    for row in randn(2, 5):  # of another width and type
        ordering.observe(row)
    assert ordering.epoch == 1


@pytest.mark.parametrize(
    ("pick", "count", "message"),
    [
        (lambda seen, free: [*free[:2], *seen[:2]], 2, "has been observed already in this epoch"),
        (lambda seen, free: [*free[:2], *free[:2]], 2, "has been observed already in this epoch"),
        (lambda seen, free: [*free[:2], 97, 98], 2, r"examples \[97, 98\] are named; the dataset has 12"),
        (lambda seen, free: [*free[:2], -1, -2], 2, r"the dataset has 12 of them, 0 to 11"),
        (lambda seen, free: [free[0], free[2]], 1, r"are no unit of this process; name the 2 dataset indices"),
        (lambda seen, free: free[:4], 3, "3 rows, but 4 named examples make 2 units of 2"),
        (lambda seen, free: [], 1, "0 named examples make 0 units"),
    ],
)
def test_naming_units(pick: Any, count: int, message: str) -> None:
    ordering = Ordering(12, batch_size=4, unit_size=2)
    planned = list(ordering.sampler)
    ordering.observe(randn(2, 3), units=torch.tensor(planned[:4]))
    before = state_of(ordering)
    with pytest.raises(ValueError, match=message):
        ordering.observe(randn(count, 3), units=torch.tensor(pick(planned[:4], planned[4:])))
    assert state_of(ordering) == before


def test_naming_units_of_another_rank() -> None:
    ordering = Ordering(12, batch_size=2, unit_size=1, order="pair", world=World(0, 2))
    theirs = Ordering(12, batch_size=2, unit_size=1, order="pair", world=World(1, 2)).order[:2]
    with pytest.raises(ValueError, match="are no unit of this process"):
        ordering.observe(randn(2, 3), units=theirs)


@pytest.mark.parametrize("epoch", [-1, 1.0, None, True])
def test_set_epoch(epoch: Any) -> None:
    with pytest.raises(ValueError, match=f"epoch is {epoch}; it must be a whole number, 0 or more"):
        Ordering(10, batch_size=2).sampler.set_epoch(epoch)


def test_rows_of_models() -> None:
    with pytest.raises(ValueError, match="the model has no trainable parameter"):
        flat_grad(torch.nn.ReLU())
    with pytest.raises(ValueError, match="the row has 2 numbers, the model 3 trainable parameters"):
        set_flat_grad(torch.nn.Linear(2, 1), torch.zeros(2))

"""`cdgrab.ordered`: a loader that somebody already has, in a balanced order."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import cdgrab
from _inputs import randn
from cdgrab import loaders

DATA = TensorDataset(torch.arange(22), randn(22, 3))


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OtherLoader(DataLoader[Any]):
    """A loader that may do anything."""


def doubled(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([index for index, _ in items]), torch.stack([2 * row for _, row in items])


def pass_of(loader: DataLoader[Any], ordering: cdgrab.Ordering) -> list[list[int]]:
    """The batches of an epoch, each observed."""
    batches = []
    for index, rows in loader:
        ordering.observe(rows)
        batches.append(index.tolist())
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "order",
    [{}, {"shuffle": True}, {"sampler": DistributedSampler(DATA, num_replicas=1, rank=0)}],
    ids=["sequential", "shuffled", "distributed"],
)
def test_the_same_loader_in_the_order_of_an_ordering(order: dict[str, Any], drop_last: bool) -> None:
    given = DataLoader(DATA, batch_size=4, drop_last=drop_last, collate_fn=doubled, **order)
    ordering, loader = cdgrab.ordered(given, seed=3)
    expected = cdgrab.Ordering(DATA, batch_size=4, drop_last=drop_last, seed=3)
    for _ in range(3):
        planned = torch.tensor(list(expected.sampler)).split(4)
        found = pass_of(loader, ordering)
        assert found == [batch.tolist() for batch in planned]
        for batch in planned:
            expected.observe(2 * DATA.tensors[1][batch])
    assert ordering.epoch == 3
    assert ordering.seed == 3


def test_all_that_is_no_order_is_taken_over() -> None:
    options: dict[str, Any] = {
        "num_workers": 1,
        "collate_fn": doubled,
        "timeout": 9,
        "worker_init_fn": print,
        "multiprocessing_context": "fork",
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": False,
    }
    given = DataLoader(DATA, batch_size=4, **options)
    _, loader = cdgrab.ordered(given)
    assert loader is not given
    for name in {**options, "dataset": DATA, "batch_size": 4, "drop_last": False}:
        assert getattr(loader, name) == getattr(given, name), name


def test_every_argument_of_a_loader_is_taken_over_or_refused() -> None:
    """A new argument of PyTorch's must not be lost in silence."""
    known = {*loaders._KEPT, "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}
    known |= {"self", "pin_memory_device"}  # deprecated: PyTorch ignores it
    assert set(inspect.signature(DataLoader.__init__).parameters) <= known


def test_a_plain_batch_sampler_is_taken_over() -> None:
    batches = BatchSampler(RandomSampler(DATA), batch_size=4, drop_last=True)
    ordering, loader = cdgrab.ordered(DataLoader(DATA, batch_sampler=batches))
    assert (ordering.batch_size, ordering.drop_last, loader.batch_size, loader.drop_last) == (4, True, 4, True)


@pytest.mark.parametrize("data", [Subset(DATA, range(3, 19)), ConcatDataset([DATA, DATA])], ids=["subset", "concat"])
def test_parts_and_sums_of_datasets(data: Any) -> None:
    ordering, loader = cdgrab.ordered(DataLoader(data, batch_size=4))
    every = sorted(int(data[k][0]) for k in range(len(data)))
    for _ in range(2):
        assert sorted(itertools.chain(*pass_of(loader, ordering))) == every


def test_what_is_accumulated() -> None:
    given = DataLoader(DATA, batch_size=4)
    assert cdgrab.ordered(given, accumulate=2)[0].unit_size == 1
    assert cdgrab.ordered(given, accumulate=2, unit_size=4)[0].unit_size == 8
    assert cdgrab.ordered(given, accumulate=2, unit_size=8)[0].unit_size == 8
    assert cdgrab.ordered(given, accumulate=2, unit_size=2)[0].unit_size == 2
    assert cdgrab.ordered(given, unit_size=4)[0].unit_size == 4


class Scaled(nn.Module):
    """Shows no gradients of single examples: its only trained parameter belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).requires_grad_(False)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scales[0]).sum()  # type: ignore[no-any-return]


def test_batches_never_become_the_units_if_gradients_are_accumulated() -> None:
    """Half an accumulated gradient would be taken for that of a batch."""
    ordering, _ = cdgrab.ordered(DataLoader(DATA, batch_size=4))
    ordering.attach(Scaled())
    assert ordering.unit_size == 4
    accumulated, _ = cdgrab.ordered(DataLoader(DATA, batch_size=4), accumulate=2)
    with pytest.raises(ValueError, match="no trained parameter can be balanced"):
        accumulated.attach(Scaled())


def ordered_once() -> DataLoader[Any]:
    return cdgrab.ordered(DataLoader(DATA, batch_size=4))[1]


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(Streamed(), batch_size=2), {}, r"Streamed is an iterable-style.*materialise its examples"),
        (DataLoader(DATA, batch_size=None), {}, "the loader has batch_size=None; give it a batch size"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), {}, "a batch_sampler of its own, list.*pass batch_size="),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 22, 22)), {}, "has WeightedRandomSampler.*repeat its"),
        (DataLoader(DATA, sampler=SubsetRandomSampler(range(4))), {}, "has SubsetRandomSampler.*pass a Subset"),
        (DataLoader(DATA, sampler=[0, 1]), {}, "has a list as sampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, True)), {}, r"draws 22 of 22 examples \(replacement=True"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, False, 9)), {}, r"draws 9 of 22 examples"),
        (DataLoader(DATA, in_order=False), {}, "in_order=False, so batches overtake each other.*leave it out"),
        (OtherLoader(DATA), {}, r"the loader is a OtherLoader; it may do more.*sampler=ordering\.sampler"),
        ([[1], [2]], {}, r"the loader is a list; pass a torch\.utils\.data\.DataLoader"),
        (ordered_once(), {}, "in a balanced order already; use the ordering"),
        (DataLoader(DATA), {"batch_size": 4}, "batch_size was given, which the loader says already"),
        (DataLoader(DATA), {"accumulate": 0}, "accumulate is 0; it must be a whole number, 1 or more"),
    ],
)
def test_loaders_whose_order_cannot_be_replaced(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cdgrab.ordered(loader, **options)

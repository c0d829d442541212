"""`DataLoader` as people use it."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from _asserts import assert_permutation
from _inputs import randn
from cdgrab import Indexed, Ordering

VECTORS = randn(50, 4)


class Slow(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """The first worker process dawdles, so that batches overtake each other where they may."""

    def __len__(self) -> int:
        return len(VECTORS)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        if info is not None and info.id == 0:
            time.sleep(0.01)
        return index, VECTORS[index]


def loader_of(ordering: Ordering, **options: object) -> DataLoader[list[torch.Tensor]]:
    dataset = TensorDataset(torch.arange(50), VECTORS)
    return DataLoader(dataset, ordering.batch_size, sampler=ordering.sampler, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 4},
        {"num_workers": 4, "persistent_workers": True, "prefetch_factor": 4},
        {"num_workers": 1, "prefetch_factor": 8},
    ],
    ids=str,
)
def test_loaders_make_no_difference(options: dict[str, int]) -> None:
    ordering = Ordering(50, batch_size=4, unit_size=1)
    loader, expected = loader_of(ordering, **options), Ordering(50, batch_size=4, unit_size=1)
    for _ in range(3):
        seen = []
        for index, rows in loader:
            seen.append(index)
            ordering.observe(rows)
        planned = torch.tensor(list(expected.sampler))
        assert torch.equal(torch.cat(seen), planned)
        for batch in planned.split(4):
            expected.observe(VECTORS[batch])
        assert torch.equal(ordering.order, expected.order)
    assert ordering.epoch == 3


def test_out_of_order_batches_with_named_units() -> None:
    ordering = Ordering(50, batch_size=4, unit_size=1)
    loader = DataLoader(Slow(), 4, sampler=ordering.sampler, num_workers=3, in_order=False)
    overtaken = False
    for epoch in range(3):
        seen, planned = [], list(ordering.sampler)
        for index, rows in loader:
            seen += index.tolist()
            ordering.observe(rows, units=index)
        overtaken |= seen != planned
        assert_permutation(seen, range(50))
        assert ordering.epoch == epoch + 1
        assert_permutation(ordering.order, range(50))
    assert overtaken


def test_indexed_dataset_names_units() -> None:
    ordering = Ordering(50, batch_size=4, unit_size=1)
    for index, (rows,) in DataLoader(Indexed(TensorDataset(VECTORS)), 4, sampler=ordering.sampler):
        assert torch.equal(VECTORS[index], rows)
        ordering.observe(rows, units=index)
    assert ordering.epoch == 1


def test_a_loop_broken_off_goes_on_where_it_stopped() -> None:
    ordering, expected = (Ordering(50, batch_size=4, unit_size=1) for _ in range(2))
    loader = loader_of(ordering, num_workers=2, prefetch_factor=4)
    seen = []
    for stop in (5, 100):
        for step, (index, rows) in enumerate(loader):
            if step == stop:
                break
            seen.append(index)
            ordering.observe(rows)
    planned = torch.tensor(list(expected.sampler))
    assert torch.equal(torch.cat(seen), planned)
    for batch in planned.split(4):
        expected.observe(VECTORS[batch])
    assert torch.equal(ordering.order, expected.order)


def test_a_loop_broken_off_for_good() -> None:
    ordering = Ordering(50, batch_size=4, unit_size=1)
    loader = loader_of(ordering)
    visited: set[int] = set()
    for epoch in range(4):
        ordering.sampler.set_epoch(epoch)
        for step, (index, rows) in enumerate(loader):
            if step == 6:
                break
            visited |= set(index.tolist())
            ordering.observe(rows)
        assert_permutation(ordering.order, range(50))
    assert visited == set(range(50))


def test_passes_that_observe_nothing_leave_no_trace() -> None:
    ordering, undisturbed = (Ordering(50, batch_size=4, unit_size=1) for _ in range(2))
    loader, quiet = loader_of(ordering), loader_of(undisturbed)
    for _ in range(2):
        next(iter(loader))  # a look at one batch
        for step, (index, rows) in enumerate(loader):
            if step == 5:
                ahead = [batch for batch, _ in loader]  # an evaluation pass in the middle
                assert torch.equal(ahead[0], index)
            ordering.observe(rows)
        list(loader)  # another one at the end
        for _, rows in quiet:
            undisturbed.observe(rows)
        assert torch.equal(ordering.order, undisturbed.order)
        assert ordering.epoch == undisturbed.epoch


def test_two_iterators_see_the_same() -> None:
    loader = loader_of(Ordering(50, batch_size=4, unit_size=1))
    for (one, _), (other, _) in zip(iter(loader), iter(loader), strict=True):
        assert torch.equal(one, other)


def test_drop_last_on_both_sides() -> None:
    ordering = Ordering(50, batch_size=4, unit_size=1, drop_last=True)
    visited: set[int] = set()
    for epoch in range(4):
        count = 0
        for index, rows in loader_of(ordering, drop_last=True):
            count += 1
            visited |= set(index.tolist())
            ordering.observe(rows)
        assert count == 12
        assert ordering.epoch == epoch + 1
    assert visited == set(range(50))


def test_drop_last_in_the_loader_alone_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    ordering = Ordering(50, batch_size=4, unit_size=1)
    loader = loader_of(ordering, drop_last=True)
    for _, rows in loader:
        ordering.observe(rows)
    message = r"epoch 0 has 2 examples left, fewer than a batch\. If the loader drops its last batch, make the ordering"
    assert list(loader) == []
    assert list(loader) == []
    assert re.search(message, caplog.text)
    with pytest.raises(RuntimeError, match=message):
        next(iter(loader))
    ordering.sampler.set_epoch(1)
    assert len(list(loader)) == 12


def test_it_is_a_distributed_sampler() -> None:
    sampler = Ordering(50, batch_size=4).sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank, sampler.num_samples, len(sampler)) == (1, 0, 50, 50)


def test_unit_is_a_batch() -> None:
    """The last batch is short, fills no unit, and comes last in every epoch."""
    ordering = Ordering(50, batch_size=8, unit_size=8)
    tails = []
    for _ in range(3):
        for index, rows in loader_of(ordering):
            last = index
            ordering.observe(rows.mean(0))
        tails.append(sorted(last.tolist()))
    assert ordering.epoch == 3
    assert tails[0] == tails[1] == tails[2]
    assert len(tails[0]) == 2
    assert len(ordering.order) == 48

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from _asserts import assert_permutation
from cdgrab import Ordering, World
from cdgrab.lanes import deal

sizes = st.integers(1, 60)
workers = st.integers(1, 9)
unit_sizes = st.integers(1, 7)


@given(num_examples=sizes, size=workers, unit_size=unit_sizes, seed=st.integers(0, 5))
def test_every_example_belongs_to_one_worker(num_examples: int, size: int, unit_size: int, seed: int) -> None:
    dealt = [deal(num_examples, World(rank, size), unit_size=unit_size, seed=seed) for rank in range(size)]
    assert_permutation(np.concatenate([units.shards[0] for units in dealt]), range(num_examples))
    for rank, units in enumerate(dealt):
        assert len(units.group(0)) == units.num_units(rank)
        order = np.random.default_rng(seed).permutation(units.num_units(rank))
        for epoch in (0, 1):
            padding = units.padding(epoch)[0]
            visited = units.examples(0, order, padding)
            assert len(visited) == units.num_samples
            assert_permutation(visited[: len(visited) - len(padding)], units.shards[0])


@given(num_examples=sizes, size=workers, batch_size=unit_sizes, seed=st.integers(0, 5))
def test_first_epoch_is_that_of_distributed_sampler(num_examples: int, size: int, batch_size: int, seed: int) -> None:
    for rank in range(size):
        rival: DistributedSampler[int] = DistributedSampler(range(num_examples), size, rank, seed=seed)  # type: ignore[arg-type]
        ordering = Ordering(num_examples, batch_size=batch_size, world=World(rank, size), seed=seed)
        assert list(ordering.sampler) == list(rival)
        assert len(ordering.sampler) == len(rival)


@given(num_examples=sizes, size=workers, seed=st.integers(0, 5), epoch=st.integers(0, 4))
def test_global_rr_is_distributed_sampler_in_every_epoch(num_examples: int, size: int, seed: int, epoch: int) -> None:
    for rank in range(size):
        rival: DistributedSampler[int] = DistributedSampler(range(num_examples), size, rank, seed=seed)  # type: ignore[arg-type]
        ordering = Ordering(num_examples, batch_size=1, order="global-rr", world=World(rank, size), seed=seed)
        rival.set_epoch(epoch)
        ordering.sampler.set_epoch(epoch)
        assert list(ordering.sampler) == list(rival)


@given(num_examples=sizes, size=workers)
def test_sequential_is_distributed_sampler_without_shuffling(num_examples: int, size: int) -> None:
    rival: DistributedSampler[int] = DistributedSampler(range(num_examples), size, size - 1, shuffle=False)  # type: ignore[arg-type]
    ordering = Ordering(num_examples, batch_size=1, order="sequential", world=World(size - 1, size))
    assert list(ordering.sampler) == list(rival)


def test_drop_last_takes_whole_batches_and_forgets_nobody() -> None:
    ordering = Ordering(23, batch_size=4, unit_size=1, world=World(1, 2), drop_last=True, order="rr")
    visited: set[int] = set()
    for epoch in range(8):
        ordering.sampler.set_epoch(epoch)
        examples = list(ordering.sampler)
        assert len(examples) == len(ordering.sampler) == 8
        visited |= set(examples)
    assert visited == set(ordering.order.tolist())
    assert len(visited) == 11


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="7 examples do not fill one batch of 4 on each of 2 workers"):
        Ordering(7, batch_size=4, world=World(0, 2), drop_last=True)

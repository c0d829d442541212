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
ranks = st.integers(1, 9)
unit_sizes = st.integers(1, 7)


@given(num_examples=sizes, size=ranks, unit_size=unit_sizes, local=st.integers(1, 4), seed=st.integers(0, 5))
def test_every_example_belongs_to_one_rank(num_examples: int, size: int, unit_size: int, local: int, seed: int) -> None:
    dealt = [
        deal(num_examples, World(rank, size), lanes=size * local, unit_size=unit_size, seed=seed)
        for rank in range(size)
    ]
    everything = []
    for lanes in dealt:
        order = np.random.default_rng(seed).permutation(lanes.num_units)
        for epoch in (0, 1):
            padding = lanes.padding(epoch)
            visited = lanes.examples(order, padding)
            assert len(visited) == lanes.num_samples
        everything.append(visited[: len(visited) - len(padding)])
        assert lanes.visited_L[lanes.local].sum() == lanes.num_visited == lanes.num_units
        assert lanes.visited_L.tolist() == dealt[0].visited_L.tolist()
    assert_permutation(np.concatenate(everything), range(num_examples))


@given(num_examples=sizes, log_ranks=st.integers(0, 3), batch=st.sampled_from([8, 16, 24]), seed=st.integers(0, 5))
def test_lanes_have_the_same_examples_on_any_number_of_ranks(
    num_examples: int, log_ranks: int, batch: int, seed: int
) -> None:
    size = 2**log_ranks
    alone = Ordering(num_examples, batch_size=batch, unit_size=1, seed=seed).orders
    for rank in range(size):
        mine = Ordering(num_examples, batch_size=batch // size, unit_size=1, seed=seed, world=World(rank, size))
        assert [lane.tolist() for lane in mine.orders] == [lane.tolist() for lane in alone[rank::size]]


def test_the_last_visit_may_be_short() -> None:
    lanes = deal(11, World(1, 2), lanes=4)  # six examples, and five of them on this rank
    assert lanes.visited_L.tolist() == [3, 3, 3, 2]
    assert lanes.counts(0, 2, range(4)) is None
    counts = lanes.counts(1, 2, range(4))
    assert counts is not None
    assert counts.tolist() == [[True, True, True, True], [True, True, True, False]]


@given(num_examples=sizes, size=ranks, batch_size=unit_sizes, seed=st.integers(0, 5))
def test_first_epoch_is_that_of_distributed_sampler(num_examples: int, size: int, batch_size: int, seed: int) -> None:
    for rank in range(size):
        rival: DistributedSampler[int] = DistributedSampler(range(num_examples), size, rank, seed=seed)  # type: ignore[arg-type]
        ordering = Ordering(num_examples, batch_size=batch_size, world=World(rank, size), seed=seed)
        assert list(ordering.sampler) == list(rival)
        assert len(ordering.sampler) == len(rival)


@given(num_examples=sizes, size=ranks, seed=st.integers(0, 5), epoch=st.integers(0, 4))
def test_global_rr_is_distributed_sampler_in_every_epoch(num_examples: int, size: int, seed: int, epoch: int) -> None:
    for rank in range(size):
        rival: DistributedSampler[int] = DistributedSampler(range(num_examples), size, rank, seed=seed)  # type: ignore[arg-type]
        ordering = Ordering(num_examples, batch_size=1, order="global-rr", world=World(rank, size), seed=seed)
        rival.set_epoch(epoch)
        ordering.sampler.set_epoch(epoch)
        assert list(ordering.sampler) == list(rival)


@given(num_examples=sizes, size=ranks)
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


def test_padding_is_drawn_anew_in_every_epoch() -> None:
    """Nobody is repeated for ever: with four ranks three of five examples are, others in other epochs."""
    dealt = [deal(5, World(rank, 4)) for rank in range(4)]
    repeated = [[lanes.padding(epoch).tolist() for lanes in dealt] for epoch in range(1, 41)]
    assert all([len(mine) for mine in epoch] == [0, 1, 1, 1] for epoch in repeated)
    assert len({str(epoch) for epoch in repeated}) > 20
    for rank in (1, 2, 3):
        assert {epoch[rank][0] for epoch in repeated} == set(range(5))


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="7 examples do not fill one batch of 4 on each of 2 processes"):
        Ordering(7, batch_size=4, world=World(0, 2), drop_last=True)

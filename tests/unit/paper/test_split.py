"""Splits: every example has a place, workers get what the split says, and seeds repeat it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cdgrab import Ordering, World
from cdgrab.paper.split import placed


def shards(partition: str, labels: torch.Tensor, workers: int, seed: int = 0) -> list[torch.Tensor]:
    """The classes each worker trains on, in its first order."""
    places = placed(partition, labels, len(labels), workers, seed)
    assert sorted(places.tolist()) == list(range(len(labels)))
    ordering = Ordering(len(labels), batch_size=workers, unit_size=1, world=World.simulated(workers), seed=seed)
    return [labels[places[order]] for order in ordering.orders]


LABELS = torch.arange(103) % 5


@pytest.mark.parametrize("partition", ["iid", "sorted", "dirichlet:0.1", "dirichlet:100"])
@pytest.mark.parametrize("workers", [1, 4, 7])
def test_every_example_is_dealt_once(partition: str, workers: int) -> None:
    found = shards(partition, LABELS, workers)
    assert sorted(torch.cat(found).tolist()) == sorted(LABELS.tolist())


def test_sorted_workers_have_few_classes_and_are_shuffled() -> None:
    found = shards("sorted", LABELS, 3)
    assert max(len(set(mine.tolist())) for mine in found) <= 3
    assert any(mine.tolist() != sorted(mine.tolist()) for mine in found)


def test_dirichlet_is_between_the_two() -> None:
    def skew(partition: str) -> float:
        counts = [torch.bincount(mine, minlength=5).double() for mine in shards(partition, LABELS.repeat(20), 4)]
        return float(np.mean([float((count / count.sum()).max()) for count in counts]))

    assert skew("iid") < skew("dirichlet:1") < skew("dirichlet:0.05") <= 1
    assert skew("dirichlet:1000") == pytest.approx(skew("iid"), abs=0.04)  # what drawing leaves


def test_seeds() -> None:
    first, again, other = (placed("dirichlet:0.3", LABELS, 103, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "partition", ["", "dirichlet", "dirichlet:0", "dirichlet:-1", "dirichlet:x", "sorted:2", "nan"]
)
def test_unknown_splits(partition: str) -> None:
    with pytest.raises(ValueError, match="unknown partition"):
        placed(partition, LABELS, 103, 4, 0)


def test_a_split_by_class_needs_classes() -> None:
    with pytest.raises(ValueError, match="needs classes"):
        placed("sorted", None, 10, 2, 0)

"""Splits: every example has a place, workers get what the split says, and seeds repeat it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from _problems import config
from cdgrab import Ordering
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.split import placed


def chosen(partition: str, workers: int, seed: int = 0, order: str = "cd-grab") -> RunConfig:
    made = config(workers=workers, batch_size=workers, seed=seed, order=order)
    return replace(made, partition=partition)


def shards(partition: str, labels: torch.Tensor, workers: int, order: str = "cd-grab") -> list[torch.Tensor]:
    """The classes each worker trains on, in its first order."""
    places = placed(chosen(partition, workers, order=order), labels, len(labels))
    assert sorted(places.tolist()) == list(range(len(labels)))
    ordering = Ordering(len(labels), batch_size=workers, unit_size=1, order=order, lanes=workers)
    return [labels[places[order]] for order in ordering.orders]


LABELS = torch.arange(103) % 5


@pytest.mark.parametrize("partition", ["iid", "sorted", "dirichlet:0.1", "dirichlet:100"])
@pytest.mark.parametrize("workers", [1, 4, 7])
def test_every_example_is_dealt_once(partition: str, workers: int) -> None:
    found = shards(partition, LABELS, workers)
    assert sorted(torch.cat(found).tolist()) == sorted(LABELS.tolist())


@pytest.mark.parametrize("order", ["cd-grab", "rr", "shuffle-once", "sequential", "id-grab"])
def test_sorted_workers_have_few_classes_and_are_shuffled(order: str) -> None:
    found = shards("sorted", LABELS, 3, order)
    assert max(len(set(mine.tolist())) for mine in found) <= 3
    assert any(mine.tolist() != sorted(mine.tolist()) for mine in found)


def test_dirichlet_is_between_the_two() -> None:
    def skew(partition: str) -> float:
        counts = [torch.bincount(mine, minlength=5).double() for mine in shards(partition, LABELS.repeat(20), 4)]
        return float(np.mean([float((count / count.sum()).max()) for count in counts]))

    assert skew("iid") < skew("dirichlet:1") < skew("dirichlet:0.05") <= 1
    assert skew("dirichlet:1000") == pytest.approx(skew("iid"), abs=0.04)  # what drawing leaves


def test_seeds() -> None:
    first, again, other = (placed(chosen("dirichlet:0.3", 4, seed), LABELS, 103) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "partition", ["", "dirichlet", "dirichlet:0", "dirichlet:-1", "dirichlet:x", "sorted:2", "nan"]
)
def test_unknown_splits(partition: str) -> None:
    with pytest.raises(ValueError, match="unknown partition"):
        placed(chosen(partition, 4), LABELS, 103)


def test_a_split_by_class_needs_classes() -> None:
    with pytest.raises(ValueError, match="needs classes"):
        placed(chosen("sorted", 2), None, 10)


@pytest.mark.parametrize("order", ["cd-grab", "rr", "sequential"])
def test_stretches_belong_to_workers(order: str) -> None:
    places = placed(chosen("iid", 4, order=order), None, 80, 4)
    dealt = Ordering(80, batch_size=4, unit_size=1, order=order, lanes=4)
    for worker, units in enumerate(dealt.orders):
        mine = places[units].tolist()
        stretch = list(range(20 * worker, 20 * worker + 20))
        assert sorted(mine) == stretch
        assert (mine == stretch) == (order == "sequential")


@pytest.mark.parametrize("changes", [{"workers": 2}, {"batch_size": 8}, {"partition": "sorted"}])
def test_stretches_need_a_worker_each(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cut into 4 stretches, one for each worker"):
        placed(replace(chosen("iid", 4), **changes), LABELS, 80, 4)

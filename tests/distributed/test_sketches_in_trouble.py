"""Sketches on real ranks when something happens: states inside a pair, overflow, a rank that is gone."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from cdgrab import Ordering
from distributed._ranks import run_ranks, start_ranks
from distributed.test_example_sources import X, Y, net


def fresh() -> tuple[Ordering, DistributedDataParallel]:
    ordering = Ordering(26, batch_size=8 // dist.get_world_size(), unit_size=1)
    model = DistributedDataParallel(net())
    ordering.attach(model, source="sketch", length=32)
    return ordering, model


def steps(ordering: Ordering, model: nn.Module, count: int) -> list[Any]:
    seen: list[Any] = []
    for _ in range(count):
        batch = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
        cross_entropy(model(X[batch]), Y[batch]).backward()
        seen.append(batch.tolist())
    return [*seen, ordering.metrics()["imbalance"]]


def resumed(stop: int) -> bool:
    ordering, model = fresh()
    steps(ordering, model, stop)
    state = ordering.state_dict()
    expected = steps(ordering, model, 12)
    ordering, model = fresh()
    ordering.load_state_dict(state)
    return steps(ordering, model, 12) == expected


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resume_leaves_no_trace_between_the_steps_of_a_pair(stop: int) -> None:
    assert run_ranks(2, resumed, stop) == [True, True]


def overflows(rank: int) -> tuple[list[list[int]], float, float, bool]:
    """An epoch with a loss scaler; one example of one rank overflows in one step."""
    ordering, model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    while ordering.epoch == 0:
        batch = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
        x = X[batch].clone()
        if dist.get_rank() == rank and ordering.examples_left == 9:
            x[1] = float("inf")
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), Y[batch])).backward()
        scaler.step(optimizer)
        scaler.update()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    orders = [order.tolist() for order in ordering.orders]
    return orders, ordering.metrics()["nonfinite"], scaler.get_scale(), finite


def test_an_overflow_on_one_rank_is_left_out_on_all() -> None:
    answers = run_ranks(2, overflows, 1)
    assert sorted(unit for orders, *_ in answers for order in orders for unit in order) == list(range(26))
    for _, nonfinite, scale, finite in answers:
        assert nonfinite == 1
        assert scale == 2.0**9  # both ranks skipped the step
        assert finite


def is_gone() -> None:
    """The model is not wrapped, so that nothing but the rows of the others is waited for."""
    ordering, model = Ordering(26, batch_size=4, unit_size=1), net()
    ordering.attach(model, source="sketch", length=32)
    steps(ordering, model, 2)
    if dist.get_rank() == 1:
        os._exit(1)
    steps(ordering, model, 3)


def test_a_rank_that_dies_takes_the_others_down_within_the_time_out() -> None:
    (_, survivor), (_, dead) = start_ranks(2, is_gone, timeout=5)
    assert dead == "no answer"
    assert survivor is not None
    assert re.match(r"LostPeer: epoch 0, step [23]: rank 0 of 2 waited for rows of other ranks", survivor)


def saves_alone() -> None:
    ordering, model = Ordering(26, batch_size=4, unit_size=1), net()
    ordering.attach(model, source="sketch", length=32)
    steps(ordering, model, 2)
    if dist.get_rank() == 0:
        ordering.state_dict()


def test_a_state_that_one_rank_asks_for_alone_says_that_all_must() -> None:
    (_, alone), _ = start_ranks(2, saves_alone, timeout=3)
    assert alone is not None
    assert re.match(r"LostPeer: epoch 0, step 2: rank 0 of 2 waited for the state \(all ranks call state_dict", alone)

"""What ranks easily get wrong: an error on every one of them, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _inputs import randn
from cdgrab import Ordering
from distributed._ranks import run_ranks, start_ranks


def made_too_early() -> list[str]:
    """An ordering as it would be made before the process group, and used after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        examples, batches = Ordering(8, batch_size=2, unit_size=1), Ordering(8, batch_size=2)
    model = DistributedDataParallel(nn.Linear(3, 2))
    messages = []
    uses: list[Any] = [
        lambda: examples.attach(model, source="sketch"),
        lambda: batches.attach(model),
        lambda: list(examples.sampler),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"made for a world of 1, and torch\.distributed has 2 ranks") as caught:
            use()
        messages.append(str(caught.value))
    return messages


def test_an_ordering_is_made_after_the_process_group() -> None:
    for messages in run_ranks(2, made_too_early):
        assert all("make the ordering after init_process_group(), on every rank" in text for text in messages)


def rows_of_different_width(exchange: str) -> None:
    Ordering(8, batch_size=2, unit_size=1, exchange=exchange).observe(randn(2, 5 + 35 * dist.get_rank()))


def rows_of_different_types() -> None:
    Ordering(8, batch_size=2, unit_size=1).observe(randn(2, 5).to((torch.float32, torch.float64)[dist.get_rank()]))


@pytest.mark.parametrize("exchange", ["sharded", "gather", "server"])
def test_rows_have_the_same_width_everywhere(exchange: str) -> None:
    for _, error in start_ranks(2, rows_of_different_width, exchange, timeout=20):
        assert error is not None
        assert "ranks disagree on the number of columns of the rows (rank 0: 5, rank 1: 40)" in error


def test_rows_have_the_same_type_everywhere() -> None:
    for _, error in start_ranks(2, rows_of_different_types, timeout=20):
        assert error is not None
        assert "ranks disagree on the type of the rows (rank 0: 'torch.float32', rank 1: 'torch.float64')" in error


def trained(*, compiled: bool) -> tuple[list[int], float]:
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Linear(3, 2).double())
    if compiled:
        model = torch.compile(model, backend="eager")
    ordering, x = Ordering(16, batch_size=2, unit_size=2), randn(16, 3, dtype=torch.float64)
    ordering.attach(model)
    while ordering.epoch < 2:
        model(x[ordering.remaining()[:2]]).square().sum().backward()
    found = ordering.order.tolist(), float(model.module.weight.grad.sum())
    ordering.close()
    return found


def plain_and_compiled() -> list[tuple[list[int], float]]:
    return [trained(compiled=compiled) for compiled in (False, True)]


def test_a_compiled_model_is_unwrapped() -> None:
    for plain, compiled in run_ranks(2, plain_and_compiled):
        assert compiled == plain

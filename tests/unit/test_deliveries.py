"""What arrives is compared with what was dealt: the mistakes that would give gradients to wrong examples."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from _inputs import randn
from cdgrab import Ordering

NUM = 2048
DATA = TensorDataset(randn(NUM, 4), torch.arange(NUM) % 3)


def attached(**options: Any) -> tuple[Ordering, nn.Module]:
    torch.manual_seed(0)
    model, ordering = nn.Linear(4, 3), Ordering(DATA, **options)
    ordering.attach(model, source="batch")
    return ordering, model


def train(model: nn.Module, batches: Iterable[list[Tensor]], passes: int = 1, every: int = 1) -> None:
    for number, (x, y) in enumerate(batches):
        for _ in range(passes if number % every == 0 else 0):
            cross_entropy(model(x), y).backward()


def test_a_loader_with_larger_batches_is_an_error() -> None:
    ordering, model = attached(batch_size=32)
    loader = DataLoader(DATA, batch_size=64, sampler=ordering.sampler)
    train(model, loader)
    with pytest.raises(RuntimeError, match=r"2048 examples, and gradients of 1024 were observed.* batch_size=32"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_smaller_batches_is_an_error(workers: int) -> None:
    ordering, model = attached(batch_size=64)
    loader = DataLoader(DATA, batch_size=32, sampler=ordering.sampler, num_workers=workers)
    with pytest.raises(RuntimeError, match=r"the sampler has handed out \d+\. .* smaller than batch_size=64"):
        train(model, loader)


def test_accumulation_that_was_not_declared_is_an_error() -> None:
    ordering, model = attached(batch_size=32, unit_size=128)  # four batches are a unit; the loop steps after eight
    loader = DataLoader(DATA, batch_size=32, sampler=ordering.sampler)
    train(model, loader, every=2)
    with pytest.raises(RuntimeError, match="accumulated over batches"):
        next(iter(loader))


def test_an_extra_pass_is_an_error_at_once() -> None:
    ordering, model = attached(batch_size=64)
    with pytest.raises(RuntimeError, match=r"128 examples have been observed on rank 0, .* handed out 64"):
        train(model, DataLoader(DATA, batch_size=64, sampler=ordering.sampler), passes=2)


def test_a_batch_without_a_pass_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ordering, model = attached(batch_size=64)
    loader = DataLoader(DATA, batch_size=64, sampler=ordering.sampler)
    for number, (x, y) in enumerate(loader):
        if number != 7:
            cross_entropy(model(x), y).backward()
    assert not caplog.records
    next(iter(loader))
    assert "delivered 2048 examples, and gradients of 1984 were observed" in caplog.text


def test_a_sampler_that_is_not_used_is_a_warning_then_an_error(caplog: pytest.LogCaptureFixture) -> None:
    _, model = attached(batch_size=64)
    loader = DataLoader(DATA, batch_size=64, shuffle=True)
    train(model, loader)
    assert "nothing asked for its order" in caplog.text
    with pytest.raises(RuntimeError, match="nothing asked for its order"):
        train(model, loader)


def test_what_is_right_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Evaluation in the middle, interrupted passes, prefetching, orders dealt by hand, an epoch that is skipped."""
    caplog.set_level(logging.WARNING)
    ordering, model = attached(batch_size=64)
    loader = DataLoader(DATA, batch_size=64, sampler=ordering.sampler, num_workers=2, prefetch_factor=4)
    for number, (x, y) in enumerate(loader):
        cross_entropy(model(x), y).backward()
        if number == 5:
            next(iter(loader))  # a look at a batch, while the pass goes on
    train(model, [batch for batch, _ in zip(loader, range(9), strict=False)])
    train(model, loader)
    assert ordering.epoch == 2
    while ordering.epoch == 2:
        batch = torch.from_numpy(ordering.remaining()[:64])
        train(model, [[DATA.tensors[0][batch], DATA.tensors[1][batch]]])
    list(loader)  # observes nothing
    ordering.sampler.set_epoch(5)
    train(model, loader)
    assert ordering.epoch == 6
    assert [record.message for record in caplog.records if "observed" in record.message] == [
        "epoch 3 of order 'cd-grab' ends with no gradient observed, so its order stays; call ordering.observe() after "
        "every backward pass"
    ]

"""Factors of a backward pass against the gradients of every example alone, the slow and obvious way."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from _models import MODELS, build, factors_of, one_by_one, rows_of
from cdgrab import Ordering, flat_grad

DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_rows(name: str, dtype: torch.dtype) -> None:
    model, x, y = build(name, 6, dtype)
    expected = one_by_one(model, x, y)
    found = rows_of(model, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)
    plain = flat_grad(model)  # and the backward pass itself was not disturbed
    torch.testing.assert_close(plain, expected.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_totals_are_sums_of_rows(name: str) -> None:
    """The first batch is held against them."""
    model, x, y = build(name, 6)
    for parameter, uses in factors_of(model, x, y).items():
        shape = model.get_parameter(parameter).shape
        for factors in uses:
            torch.testing.assert_close(factors.total().view(shape), factors.rows().sum(0).view(shape))


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_sum_losses(name: str) -> None:
    model, x, y = build(name, 4)
    rows = rows_of(model, x, y, reduction="sum")
    scale = y[0].numel()  # the loss of an example alone is the mean over its own tokens
    torch.testing.assert_close(rows, scale * one_by_one(model, x, y))


@pytest.mark.parametrize(("workers", "per_step"), [(1, 4), (4, 4), (3, 6), (2, 6)])
@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer", "tied"])
def test_orders_are_those_of_rows(name: str, workers: int, per_step: int) -> None:
    """Two epochs of training, attached or fed by hand; also where the last batch is short."""
    orders = []
    for attached in (True, False):
        model, x, y = build(name, 26)
        ordering = Ordering(26, batch_size=per_step, unit_size=1, lanes=workers, seed=3)
        if attached:
            ordering.attach(model, source="per_example")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[:per_step])
            rows = None if attached else one_by_one(model, x[batch], y[batch])
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            if rows is not None:
                ordering.observe(rows)
            optimizer.step()
        orders.append([order.tolist() for order in ordering.orders])
        assert ordering.metrics()["seconds"] > 0
    assert orders[0] == orders[1]

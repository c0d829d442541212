"""Single examples on a GPU: what `attach` finds there is what it finds on the CPU. Skipped without a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import MODELS, build, one_by_one, rows_of, source_of
from cdgrab import Ordering
from cdgrab.factors import Lookup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MODELS_ON_GPU = list(MODELS)


@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_rows(name: str) -> None:
    model, x, y = build(name, 6)
    expected = one_by_one(model, x, y)
    found = rows_of(model.cuda(), x.cuda(), y.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 7, 130), (2, 100, 33), (1, 300, 128)])
def test_lookups_as_rows(shape: tuple[int, int, int]) -> None:
    """Tokens that repeat are added up; twice is the same to the bit."""
    num, positions, width = shape
    index = torch.randint(11, (num, positions), generator=torch.Generator().manual_seed(1))
    b = randn(num, positions, width)
    expected = Lookup(index, b.double(), 13).rows()
    one, other = (Lookup(index.cuda(), b.cuda(), 13).rows().cpu() for _ in range(2))
    torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(one, other)


def train(model: nn.Module, x: Tensor, y: Tensor, source: str) -> list[list[int]]:
    ordering = Ordering(len(x), batch_size=6, unit_size=1, lanes=3, seed=1)
    ordering.attach(model, source=source_of(source, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    orders = []
    for epoch in range(3):
        ordering.sampler.set_epoch(epoch)
        for batch in torch.tensor(list(ordering.sampler)).split(6):
            here = batch.to(x.device)
            cross_entropy(model(x[here]), y[here]).backward()
            optimizer.step()
            optimizer.zero_grad()
        orders.append(ordering.order.tolist())
    return orders


@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_sketches(name: str) -> None:
    model, x, y = build(name, 6)
    expected = rows_of(model, x, y, source="sketch", length=64)
    twice = [rows_of(model.cuda(), x.cuda(), y.cuda(), source="sketch", length=64).cpu() for _ in range(2)]
    torch.testing.assert_close(twice[0], expected, rtol=1e-8, atol=1e-10)
    assert torch.equal(twice[0], twice[1])


@pytest.mark.parametrize("source", ["per_example", "sketch"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "tied"])
def test_orders(name: str, source: str) -> None:
    model, x, y = build(name, 26)
    expected = train(model, x, y, source)
    model, x, y = build(name, 26)
    assert train(model.cuda(), x.cuda(), y.cuda(), source) == expected


@pytest.mark.parametrize(("source", "name"), [("per_example", "lenet"), ("sketch", "lenet"), ("sketch", "tied")])
def test_nothing_waits_for_the_device(source: str, name: str) -> None:
    """After the first batch, which is held against the gradient of `backward()`."""
    model, x, y = build(name, 64, torch.float32)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    ordering = Ordering(64 * 9, batch_size=8, unit_size=1, lanes=8)
    ordering.attach(model, source=source)
    for step in range(9):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            cross_entropy(model(x[:8]), y[:8]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

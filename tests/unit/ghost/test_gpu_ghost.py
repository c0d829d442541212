"""Single examples on a GPU: what `attach` finds there is what it finds on the CPU. Skipped without a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _models import MODELS, build, one_by_one, recorded
from cdgrab import Ordering, World
from cdgrab.ghost.records import written_out
from cdgrab.hooks.rows import ExampleRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MODELS_ON_GPU = list(MODELS)


@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_rows(name: str) -> None:
    model, x, y = build(name, 6)
    expected = one_by_one(model, x, y)
    found = written_out(*recorded(model.cuda(), x.cuda(), y.cuda()))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_rows_of_a_pass_that_stops_at_the_layers(name: str) -> None:
    model, x, y = build(name, 6)
    expected = one_by_one(model, x, y)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    found = ExampleRows(model)(lambda: cross_entropy(model(x), y), 6)
    torch.testing.assert_close(6 * found.cpu(), expected, rtol=1e-8, atol=1e-10)


def train(model: nn.Module, x: Tensor, y: Tensor, source: str) -> list[list[int]]:
    ordering = Ordering(len(x), batch_size=6, unit_size=1, world=World.simulated(3), seed=1)
    ordering.attach(model, source=source, length=60)
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


@pytest.mark.parametrize("source", ["ghost", "per_example", "sketch"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "tied"])
def test_orders(name: str, source: str) -> None:
    model, x, y = build(name, 26)
    expected = train(model, x, y, source)
    model, x, y = build(name, 26)
    assert train(model.cuda(), x.cuda(), y.cuda(), source) == expected


@pytest.mark.parametrize("source", ["ghost", "per_example", "sketch"])
def test_nothing_waits_for_the_device(source: str) -> None:
    """After the first batch, which is held against the gradient of `backward()`."""
    model, x, y = build("lenet", 64, torch.float32)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    ordering = Ordering(64 * 9, batch_size=8, unit_size=1, world=World.simulated(8))
    ordering.attach(model, source=source, fitted=False)
    for step in range(9):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            cross_entropy(model(x[:8]), y[:8]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

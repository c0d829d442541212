"""Rows from a backward pass that stops at the layers, against a backward pass for every example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _inputs import randn
from _models import MODELS, build, one_by_one
from cdgrab.ghost.layers import patches
from cdgrab.hooks.rows import ExampleRows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_rows(name: str, dtype: torch.dtype) -> None:
    model, x, y = build(name, 6, dtype)
    expected = one_by_one(model, x, y)
    rows_of = ExampleRows(model)
    for _ in range(2):  # nothing is left from one batch to the next
        found = rows_of(lambda: F.cross_entropy(model(x), y), 6)
        torch.testing.assert_close(6 * found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_without_a_gradient_gets_none() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.idle = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)  # type: ignore[no-any-return]

    model, x = Half(), randn(4, 3)
    found = ExampleRows(model)(lambda: F.cross_entropy(model(x), torch.arange(4) % 2), 4)
    assert found.shape == (4, 24)
    assert bool(found[:, :8].any(1).all())
    assert not found[:, 8:].any()


def test_what_is_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\) took or gave was changed in place"):
        ExampleRows(model)(lambda: F.cross_entropy(model(randn(4, 3)), torch.arange(4) % 2), 4)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (3, 2)])
def test_patches(
    kernel: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int], stride: tuple[int, int]
) -> None:
    x = randn(2, 3, 8, 9)
    outputs = F.conv2d(x, randn(4, 3, *kernel), None, stride, padding, dilation).shape[2:]
    expected = F.unfold(x, kernel, dilation, padding, stride)
    assert torch.equal(patches(x, outputs, kernel, dilation, padding, stride), expected)
    assert torch.equal(patches(x.mT.contiguous().mT, outputs, kernel, dilation, padding, stride), expected)
    part = patches(torch.cat([x, x])[2:], outputs, kernel, dilation, padding, stride)  # not where its memory begins
    assert torch.equal(part, expected)

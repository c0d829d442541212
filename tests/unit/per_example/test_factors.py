"""Factors of a backward pass against the gradients of every example alone, the slow and obvious way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import MODELS, build, factors_of, one_by_one, rows_of
from cdgrab import Ordering, flat_grad
from cdgrab.per_example.layers.convolution import Geometry, weight_rows

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


class TiedTable(nn.Module):
    """A table that is looked up, is also a linear layer, and is looked up once more.

    Without `answers` the linear layer has no part in the loss.
    """

    def __init__(self, words: int, answers: bool) -> None:
        super().__init__()
        self.table, self.head, self.out = nn.Embedding(words, 4), nn.Linear(4, words, bias=False), nn.Linear(4, 3)
        self.head.weight = self.table.weight
        self.answers = answers

    def forward(self, index: Tensor) -> Tensor:
        scores = self.head(self.table(index))
        again = self.table(scores.argmax(-1) if self.answers else index)
        return self.out(again.sum(1) + (scores[:, :, :4].tanh().sum(1) if self.answers else 0.0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("words", [5, 80])
def test_a_table_with_several_uses(words: int, answers: bool) -> None:
    torch.manual_seed(2)
    model = TiedTable(words, answers).double()
    x, y = torch.randint(words, (6, 3)), torch.arange(6) % 3
    torch.testing.assert_close(rows_of(model, x, y), one_by_one(model, x, y))


def test_a_layer_without_a_gradient_gets_none() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.idle = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)  # type: ignore[no-any-return]

    found = rows_of(Half(), randn(4, 3), torch.arange(4) % 2)
    assert found.shape == (4, 24)
    assert bool(found[:, :8].any(1).all())
    assert not found[:, 8:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_are_single(dtype: torch.dtype) -> None:
    model, x, y = build("tied", 6)
    expected = one_by_one(model, x, y)
    found = rows_of(model.to(dtype), x, y)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_norms_without_a_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 2)).double()
    x, y = randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    torch.testing.assert_close(rows_of(model, x, y), one_by_one(model, x, y))


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8, eps=0.5), nn.RMSNorm(8, eps=0.5), nn.GroupNorm(2, 8, eps=0.5)], ids=repr
)
def test_norms_with_an_eps_of_their_own(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), norm, nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    torch.testing.assert_close(rows_of(model, x, y), one_by_one(model, x, y))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*batching rule.*:UserWarning")
def test_weights_that_are_made_of_others() -> None:
    torch.manual_seed(0)
    layers = nn.utils.weight_norm(nn.Linear(6, 7)), nn.Tanh(), nn.Linear(7, 5)
    model, (x, y) = nn.Sequential(*layers).double(), (randn(4, 6, dtype=torch.float64), torch.arange(4))
    torch.testing.assert_close(rows_of(model, x, y), one_by_one(model, x, y))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (3, 2)])
def test_gradients_of_convolutions(
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
    groups: int,
) -> None:
    x, weight = randn(2, 3, 8, 9, dtype=torch.float64), randn(6, 3 // groups, *kernel, dtype=torch.float64)
    weight.requires_grad_()
    outputs = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    grad = randn(*outputs.shape, seed=1, dtype=torch.float64)
    expected = [torch.autograd.grad(outputs[n], weight, grad[n], retain_graph=True)[0].flatten() for n in range(2)]
    geometry = Geometry(tuple(outputs.shape[2:]), kernel, dilation, padding, stride)
    for same in (x, x.mT.contiguous().mT, torch.cat([x, x])[2:]):  # not where its memory begins
        torch.testing.assert_close(weight_rows(same, grad, geometry, groups), torch.stack(expected))

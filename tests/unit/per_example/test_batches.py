"""Which backward passes are batches, and what the first of them is held against."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import source_of
from cdgrab import Ordering

X, Y = randn(4, 6, dtype=torch.float64), torch.arange(4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4)).double()


def test_gradients_asked_for_otherwise_are_no_batch() -> None:
    net = model()
    ordering = Ordering(24, batch_size=4, unit_size=1)
    ordering.attach(net, source="sketch")
    x = X.clone().requires_grad_()
    torch.autograd.grad(net(x).sum(), x)
    assert len(ordering.remaining()) == 24
    cross_entropy(net(X), Y).backward()
    assert len(ordering.remaining()) == 20


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [[6, 4], [6, 9, 4]], ids=["one layer", "two"])
def test_gradients_of_inputs_alone_between_batches_are_no_batch(widths: list[int], bias: bool) -> None:
    net = nn.Sequential(*[nn.Linear(p, q, bias=bias) for p, q in itertools.pairwise(widths)]).double()
    ordering = Ordering(24, batch_size=4, unit_size=1)
    ordering.attach(net, source="sketch")
    x, last = X.clone().requires_grad_(), net[-1].weight
    assert isinstance(last, Tensor)
    for batch in range(0, 4, 2):
        cross_entropy(net(x), Y).backward()
        net(x).sum().backward(inputs=[x])
        torch.autograd.grad(net(x).sum(), [x, last])
        assert len(ordering.remaining()) == 20 - 4 * batch
        cross_entropy(net(x), Y).backward(inputs=[last])  # of some of the parameters it is one
        assert len(ordering.remaining()) == 16 - 4 * batch


def test_parameters_that_are_frozen_before_the_backward_pass() -> None:
    net = model()
    ordering = Ordering(24, batch_size=4, unit_size=1)
    ordering.attach(net, source="sketch")
    for _ in range(2):
        cross_entropy(net(X), Y).backward()
    loss = cross_entropy(net(X), Y)
    net.requires_grad_(False)
    loss.backward()
    assert len(ordering.remaining()) == 16  # nothing was left in them, and it was no batch


@pytest.mark.parametrize("source", ["per_example", "sketch"])
def test_a_use_that_leaves_no_gradient_is_noticed_whenever_it_comes(source: str) -> None:
    """A layer runs once while it is frozen: that output's gradient comes after the gradients of its parameters."""
    first, twice, last = (nn.Linear(6, width).double() for width in (6, 6, 4))
    ordering = Ordering(24, batch_size=4, unit_size=1)
    ordering.attach(nn.ModuleList([first, twice, last]), source=source_of(source, 2**20, strict=True))
    hidden = torch.tanh(first(X))
    twice.requires_grad_(False)
    hidden = torch.tanh(twice(hidden))
    twice.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1.bias cannot be balanced: .* do not add up to that of the batch"):
        cross_entropy(last(twice(hidden)), Y).backward()

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _inputs import randn
from cdgrab import flat_grad, per_example_grads, set_flat_grad


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_flat_grad_is_the_gradient_and_a_copy() -> None:
    net = model()
    net(randn(6, 4)).square().mean().backward()
    row = flat_grad(net)
    expected = [p.grad.clone().reshape(-1) for p in net.parameters() if p.grad is not None]
    net.zero_grad(set_to_none=False)
    assert torch.equal(row, torch.cat(expected))


def test_missing_gradients_are_zero_and_frozen_parameters_left_out() -> None:
    net = model()
    net[0].bias.requires_grad_(False)
    net[2](randn(2, 5)).sum().backward()
    row = flat_grad(net)
    assert len(row) == 4 * 5 + 5 * 3 + 3
    assert torch.equal(row[:20], torch.zeros(20))


def test_sparse_gradients_are_made_dense() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([3])).sum().backward()
    assert flat_grad(embedding).view(5, 2).sum(1).tolist() == [0, 0, 0, 2, 0]


def test_per_example_rows_with_dropout() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    rows = per_example_grads(
        net, nn.functional.cross_entropy, randn(1, 4).expand(8, 4), torch.zeros(8, dtype=torch.long)
    )
    assert len(torch.unique(rows, dim=0)) > 1


def test_set_flat_grad_is_the_reverse() -> None:
    net = model()
    row = randn(sum(p.numel() for p in net.parameters()))
    set_flat_grad(net, row)
    assert torch.equal(flat_grad(net), row)
    row.zero_()
    assert flat_grad(net).abs().sum() > 0


def test_per_example_rows_are_each_examples_gradient() -> None:
    net, x, y = model(), randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    net[0].weight.requires_grad_(False)
    rows = per_example_grads(net, nn.functional.cross_entropy, x, y)
    for i in range(6):
        net.zero_grad()
        nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        torch.testing.assert_close(rows[i], flat_grad(net))
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    torch.testing.assert_close(rows.mean(0), flat_grad(net))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), r"layer '1' \(BatchNorm1d\) mixes the examples of a batch.*GroupNorm"),
        (Branching(), r"layer 1 \(Branching\): it branches on the values of an example.*torch.where"),
        (Checkpointed(4, 4), r"layer 1 \(Checkpointed\): torch.func does not support activation checkpointing"),
    ],
)
def test_what_torch_func_cannot_do(layer: nn.Module, message: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3))
    with pytest.raises(ValueError, match=message):
        per_example_grads(net, nn.functional.cross_entropy, randn(5, 4), torch.zeros(5, dtype=torch.long))
    assert not any(module._forward_hooks for module in net.modules())

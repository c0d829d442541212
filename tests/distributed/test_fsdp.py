"""`attach` under FSDP2: the signs of DDP on the same model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cdgrab import Ordering
from distributed._ranks import run_ranks
from distributed.test_ddp import BATCH, LENGTH, Net, X, Y, simulated, train


def sharded(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    for module in (model.first, model.second):
        assert isinstance(module, nn.Module)
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])  # type: ignore[attr-defined]


def attached(size: int) -> tuple[list[list[int]], Tensor, float]:
    model = sharded(Net(), size)
    ordering = Ordering(LENGTH, batch_size=BATCH)
    ordering.attach(model)
    orders = train(ordering, model)
    return orders, whole(model), ordering.metrics()["bytes"]


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp_finds_the_orders_of_the_simulation_and_the_same_model(size: int) -> None:
    orders, parameters = simulated(size)
    for rank, (found, model, sent) in enumerate(run_ranks(size, attached, size)):
        assert found == [epoch[rank] for epoch in orders]
        torch.testing.assert_close(model, parameters)
        assert sent > 0


def detached(size: int) -> bool:
    plain, model = sharded(Net(), size), sharded(Net(), size)
    ordering = Ordering(LENGTH, batch_size=BATCH)
    ordering.attach(model)
    ordering.detach()
    for net in (plain, model):
        nn.functional.cross_entropy(net(X[:4]), Y[:4]).backward()
    same = all(
        torch.equal(a.grad.full_tensor(), b.grad.full_tensor())  # type: ignore[union-attr]
        for a, b in zip(plain.parameters(), model.parameters(), strict=True)
        if a.requires_grad
    )
    assert isinstance(model, FSDPModule)
    return same and ordering.examples_left == len(list(ordering.sampler))


def test_detaching_restores_plain_fsdp() -> None:
    assert run_ranks(2, detached, 2) == [True, True]


def refused(size: int) -> str:
    try:
        Ordering(LENGTH, batch_size=BATCH, order="pair").attach(sharded(Net(), size))
    except ValueError as error:
        return str(error)
    return ""


def test_orders_that_need_whole_rows_are_refused() -> None:
    for message in run_ranks(2, refused, 2):
        assert "with fully_shard no rank ever has a whole gradient, which order 'pair'" in message

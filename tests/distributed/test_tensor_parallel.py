"""Single examples where layers are spread over tensor-parallel peers: the orders of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cdgrab import Ordering
from distributed._ranks import run_ranks
from distributed.test_example_sources import epochs

PEERS = 2


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def on_a_rank(size: int, source: str, sharded: bool) -> tuple[list[list[list[int]]], float]:
    mesh = init_device_mesh("cpu", (size // PEERS, PEERS), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if sharded:
        fully_shard(model, mesh=mesh["data"])
    ordering = Ordering(26, batch_size=8 // (size // PEERS), unit_size=1, group=mesh["data"])
    return epochs(ordering, model, source, ordering.batch_size), ordering.metrics()["balanced"]


@pytest.mark.parametrize(
    ("size", "source", "sharded"),
    [(2, "sketch", False), (4, "sketch", False), (4, "sketch", True), (4, "per_example", True)],
)
def test_orders_are_those_of_one_process(size: int, source: str, sharded: bool) -> None:
    expected = epochs(Ordering(26, batch_size=8, unit_size=1), net(), source, 8)
    for rank, (found, balanced) in enumerate(run_ranks(size, on_a_rank, size, source, sharded)):
        data_rank, data_ranks = rank // PEERS, size // PEERS
        assert balanced == 1.0
        for epoch in range(3):
            assert found[epoch] == expected[epoch][data_rank::data_ranks]

"""DDP's hook on a GPU: streams, NCCL, and no waiting for the device.

One rank, because NCCL wants a GPU for each. FSDP reduces nothing with one rank, so it cannot be tried like this.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from _inputs import randn
from cdgrab import Ordering
from cdgrab.settings import Settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank over NCCL that takes itself for one of many, so that it uses the sharded exchange."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    monkeypatch.setattr(Settings, "ranks_meet", property(lambda _: True))
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 5)).cuda()


def train(ordering: Ordering, net: nn.Module, epochs: int, inputs: Tensor) -> list[list[int]]:
    orders = []
    for _ in range(epochs):
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            batch = torch.from_numpy(ordering.remaining()[:4]).cuda()
            net(inputs[batch]).square().sum().backward()
            net.zero_grad()
        orders.append(ordering.order.tolist())
    return orders


def attach_ddp(ordering: Ordering) -> nn.Module:
    net = DistributedDataParallel(model(), bucket_cap_mb=0.005)  # several buckets
    ordering.attach(net)
    return net


@pytest.mark.usefixtures("group")
def test_orders_are_those_of_observing() -> None:
    inputs = randn(64, 30).cuda()
    attached = Ordering(64, batch_size=4, unit_size=4, seed=1)
    net = attach_ddp(attached)
    by_hand = Ordering(64, batch_size=4, unit_size=4, seed=1)
    plain, expected = model(), []
    for _ in range(3):
        epoch = by_hand.epoch
        while by_hand.epoch == epoch:
            batch = torch.from_numpy(by_hand.remaining()[:4]).cuda()
            plain(inputs[batch]).square().sum().backward()
            by_hand.observe(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]))
            plain.zero_grad()
        expected.append(by_hand.order.tolist())
    assert train(attached, net, 3, inputs) == expected
    assert attached.metrics()["seconds"] > 0


@pytest.mark.usefixtures("group")
def test_a_step_does_not_wait_for_the_device() -> None:
    inputs = randn(400, 30).cuda()
    ordering = Ordering(400, batch_size=4, unit_size=4)
    net = attach_ddp(ordering)
    batches = [torch.arange(4 * step, 4 * step + 4).cuda() for step in range(40)]
    for batch in batches[:6]:  # buckets are rebuilt, memory is allocated, kernels are compiled
        net(inputs[batch]).square().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[6:16]:
            net(inputs[batch]).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

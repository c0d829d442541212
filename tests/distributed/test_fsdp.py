"""`attach` under FSDP2: the signs of DDP on the same model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
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
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
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
        Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH, order="pair").attach(sharded(Net(), size))
    except ValueError as error:
        return str(error)
    return ""


def test_orders_that_need_whole_rows_are_refused() -> None:
    for message in run_ranks(2, refused, 2):
        assert "with fully_shard no rank ever has a whole gradient, which order 'pair'" in message


class Reader(nn.Module):
    """Words, norms and tied weights, and a layer that would run once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))
        self.mixing = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(self.norm(x))
        found: Tensor = self.out(x + self.mixing(x, x, x, need_weights=False)[0])
        return found.mT


TOKENS = torch.randint(0, 11, (32, 5), generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, ordering: Ordering, parts: int = 1) -> list[list[list[int]]]:
    """Orders of the lanes of this process after each of three epochs of training; steps come in so many parts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            for part in range(parts):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(part == parts - 1)
                index = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
                nn.functional.cross_entropy(model(TOKENS[index]), TOKENS[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([order.tolist() for order in ordering.orders])
    return found


def of_single_examples(shape: tuple[int, ...], reshard: bool, half: bool, parts: int) -> tuple[Any, dict[str, float]]:
    model = Reader()
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.blocks, model.norm):  # the norm is wrapped as a layer
        fully_shard(module, **options)
    fully_shard(model, **options)
    ordering = Ordering(32, batch_size=8 // dist.get_world_size(), unit_size=1)
    ordering.attach(model, source="sketch", length=64)
    return trained(model, ordering, parts), ordering.metrics()


@pytest.mark.parametrize(
    ("shape", "reshard", "half", "parts"),
    [
        ((2,), True, False, 1),
        ((2,), False, False, 1),
        ((2, 2), True, False, 1),
        ((2,), True, False, 2),
        ((2,), True, True, 1),
    ],
    ids=["resharded", "kept", "replicas", "accumulated", "half precision"],
)
def test_single_examples_under_fsdp(
    shape: tuple[int, ...], reshard: bool, half: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orders of one process that leaves the attention out, too."""
    ranks = run_ranks(math.prod(shape), of_single_examples, shape, reshard, half, parts)
    model = Reader()
    ordering = Ordering(32, batch_size=8, unit_size=1)
    monkeypatch.setattr("cdgrab.sources.examples.is_sharded", lambda _: True)
    ordering.attach(model, source="sketch", length=64)
    expected = trained(model, ordering, parts)
    if not half:  # which rounds enough for other signs
        for epoch in range(3):
            found = [ranks[lane % len(ranks)][0][epoch][lane // len(ranks)] for lane in range(8)]
            assert found == expected[epoch]
    for _, metrics in ranks:
        assert metrics["balanced"] == pytest.approx(1 - 288 / sum(p.numel() for p in model.parameters()))
        assert metrics["imbalance"] == pytest.approx(ordering.metrics()["imbalance"], rel=0.2 if half else 1e-4)
        assert metrics["rows"] == 16

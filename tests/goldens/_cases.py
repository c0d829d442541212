"""Three epochs of small runs, through public names only: orders, metrics and parameters that a change must keep.

Everything is in double precision, so that no sign is within rounding of zero and the figures hold on any machine.
"""

from __future__ import annotations

import copy
import io
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import cdgrab

EPOCHS = 3
METRICS = ("rows", "imbalance", "flipped", "nonfinite", "unobserved", "bytes")


@dataclass(frozen=True)
class Case:
    """One run. Without `source` rows are computed by the loop and observed by hand."""

    order: str = "cd-grab"
    rule: str = "greedy"
    lanes: int = 4  # in one process; ranks have as many as there are by default
    batch: int = 8  # of all ranks together
    unit: int | None = 1  # None: a batch of a rank
    length: int = 53
    drop_last: bool = False
    source: str | None = None
    exchange: str | None = None
    reduction: str = "mean"
    sketch_length: int = 32
    momentum: float = 0.0

    @property
    def accumulate(self) -> int:
        """Batches in a unit."""
        return max(1, (self.unit or 0) // self.batch)


BALANCED = ("cd-grab", "pair", "grab", "id-grab", "greedy-herding")
ALONE: dict[str, Case] = {
    **{f"observe, {order}": Case(order) for order in cdgrab.ORDERS},
    **{f"observe, {order}, {rule}": Case(order, rule) for order in BALANCED[:4] for rule in ("walk", "halving")},
    "observe, one lane": Case(lanes=1),
    "observe, one lane, mean": Case("grab", lanes=1),
    "observe, a lane for every slot": Case(lanes=8),
    "observe, drop last": Case(drop_last=True),
    "observe, units of two": Case(lanes=1, unit=2),
    "observe, units are batches": Case(lanes=1, unit=8),
    "batch": Case(lanes=1, unit=None, source="batch"),
    "batch, momentum": Case(lanes=1, unit=None, source="batch", momentum=0.9),
    "batch, accumulated": Case(lanes=1, unit=16, source="batch", length=64),
    "per example, one lane": Case(lanes=1, source="per_example"),
    "per example": Case(source="per_example"),
    "per example, a lane for every slot": Case(lanes=8, source="per_example"),
    "per example, grab": Case("grab", lanes=1, source="per_example"),
    "per example, sum": Case(source="per_example", reduction="sum", length=56),
    "sketch, one lane": Case(lanes=1, source="sketch"),
    "sketch": Case(source="sketch"),
    "sketch, a lane for every slot": Case(lanes=8, source="sketch"),
    "sketch, walk": Case(source="sketch", rule="walk"),
    "sketch, longer than the model": Case(source="sketch", sketch_length=256),
}
ON_RANKS: dict[str, Case] = {
    **{f"batch, {name}": Case(unit=None, source="batch", exchange=name) for name in ("sharded", "gather", "server")},
    "batch": Case(unit=None, source="batch"),
    "batch, pair": Case("pair", unit=None, source="batch"),
    "batch, grab": Case("grab", unit=None, source="batch"),
    "batch, walk": Case(rule="walk", unit=None, source="batch"),
    **{f"per example, {name}": Case(source="per_example", exchange=name) for name in ("sharded", "gather", "server")},
    "sketch": Case(source="sketch"),
    "sketch, server": Case(source="sketch", exchange="server"),
    "observe, drop last": Case(drop_last=True),
    "observe, rr": Case("rr"),
    "observe, global-rr": Case("global-rr"),
}


class Net(nn.Module):
    """A small classifier with a layer that is looked up, so that every kind of sketch takes part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 6, dtype=torch.float64)
        self.hidden = nn.Linear(6, 9, dtype=torch.float64)
        self.norm = nn.LayerNorm(9, dtype=torch.float64)
        self.out = nn.Linear(9, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(torch.tanh(self.norm(self.hidden(x[:, :6] + self.table(x[:, 6].long())))))
        return outputs


def data(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(length, 7, generator=generator, dtype=torch.float64)
    x[:, 6] = torch.randint(0, 7, (length,), generator=generator)
    return x, torch.randint(0, 3, (length,), generator=generator)


class Training:
    """A run that can be saved at any step and taken up by another one."""

    def __init__(self, case: Case, ranks: int = 1) -> None:
        self.case = case
        self.net = Net()
        self.model: nn.Module = DistributedDataParallel(self.net) if ranks > 1 and case.source else self.net
        self.x, self.y = data(case.length)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=case.momentum)
        self.ordering = cdgrab.Ordering(
            case.length,
            batch_size=case.batch // ranks,
            unit_size=case.unit or case.batch // ranks,
            order=case.order,
            rule=case.rule,
            drop_last=case.drop_last,
            exchange=case.exchange,
            lanes=case.lanes if ranks == 1 else None,
            seed=3,
        )
        if case.source is not None:
            options: dict[str, Any] = {} if case.source == "batch" else {"reduction": case.reduction}
            options |= {"length": case.sketch_length} if case.source == "sketch" else {}
            self.ordering.attach(self.model, source=case.source, **options)
        self.seen: list[dict[str, Any]] = []
        self.steps = 0

    def train(self, until: int, steps: int | None = None) -> None:
        """Until so many epochs are over, or for so many steps."""
        ordering = self.ordering
        while len(self.seen) < until:
            epoch = ordering.epoch
            while ordering.epoch == epoch:
                batch = list(ordering.sampler)[: ordering.batch_size]
                if not batch:  # an order without gradients, of which nothing is observed, or drop_last
                    ordering.set_epoch(epoch + 1)
                    break
                self._step(torch.tensor(batch))
                if steps is not None:
                    steps -= 1
                    if steps == 0:
                        return
            metrics = ordering.metrics()
            self.seen.append({"orders": self.orders(), **_figures(metrics)})

    def orders(self) -> list[list[int]]:
        return [order.tolist() for order in self.ordering.orders]

    def _step(self, index: Tensor) -> None:
        case, x, y = self.case, self.x[index], self.y[index]
        cross_entropy(self.model(x), y, reduction=case.reduction).backward()
        if case.source is None:
            rows = cdgrab.per_example_grads(self.net, cross_entropy, x, y)
            self.ordering.observe(torch.stack([unit.mean(0) for unit in rows.split(case.unit or len(rows))]))
        self.steps += 1
        if self.steps % case.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def left(self) -> dict[str, Any]:
        """Epoch by epoch, and the parameters in two numbers."""
        flat = torch.cat([p.detach().flatten() for p in self.net.parameters()])
        epochs = [
            {**epoch, "orders": zlib.crc32(str(epoch["orders"]).encode()), "first": epoch["orders"][0][:4]}
            for epoch in self.seen
        ]
        return {"epochs": epochs, "parameters": [float(flat.sum()), float(flat.norm())]}

    def state(self) -> bytes:
        file = io.BytesIO()
        parts: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer, "ordering": self.ordering}
        torch.save({key: part.state_dict() for key, part in parts.items()}, file)
        return file.getvalue()

    def take_up(self, state: bytes, seen: list[dict[str, Any]]) -> None:
        loaded = torch.load(io.BytesIO(state), weights_only=True)
        self.net.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.ordering.load_state_dict(loaded["ordering"])
        self.seen = copy.deepcopy(seen)


def _figures(metrics: dict[str, float]) -> dict[str, float | None]:
    """Without those that depend on the machine; None stands for "not a number", which JSON does not know."""
    return {key: metrics[key] if math.isfinite(metrics[key]) else None for key in METRICS if key in metrics}


def run(case: Case, ranks: int = 1) -> dict[str, Any]:
    """What a run leaves, and what one leaves that takes it up in the middle of its second epoch."""
    straight = Training(case, ranks)
    straight.train(1)
    straight.train(EPOCHS, steps=3 * case.accumulate)  # between two units of a pair
    state, seen = straight.state(), copy.deepcopy(straight.seen)
    straight.train(EPOCHS)
    resumed = Training(case, ranks)
    resumed.take_up(state, seen)
    resumed.train(EPOCHS)
    return {**straight.left(), "resumed": resumed.left()}


def run_all(cases: dict[str, Case], ranks: int = 1) -> dict[str, Any]:
    return {name: run(case, ranks) for name, case in cases.items()}

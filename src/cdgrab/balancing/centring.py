"""What gets balanced: differences of pairs, or gradients minus last epoch's mean.

A centring takes the rows of all workers turn by turn and yields *balancing rows* in balancing order: turn by turn,
within a turn worker by worker. They come as two tensors, to be subtracted by whoever uses them, so that long rows need
not be written down. What is yielded is to be used before the next is asked for. Whatever a centring keeps, it copies.

Shapes: `b` turns, `m` balancing rows of each worker, `W` workers, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

Differences = Iterator[tuple[Tensor, Tensor]]


class Centring(Protocol):
    """One way of making balancing rows out of gradients."""

    units_per_row: int

    def start_epoch(self) -> None: ...

    def add(self, rows_bWD: Tensor) -> Differences:
        """Take the next `b` turns of workers in step; yields `m x W x D` rows and what to subtract from them.

        Turns may have two dimensions, in and out: `S x t x W x D`, of several steps.
        """

    @property
    def in_step(self) -> bool:
        """Whether all workers wait for the same half of a pair. They fall out of step where their last turns differ."""

    def add_one(self, row_D: Tensor, worker: int) -> Differences:
        """Take the next turn of one worker; yields `1 x 1 x D`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PairDifferences:
    """PairBalance: first of a pair minus second. Whatever the rows have in common cancels; no mean is needed."""

    units_per_row = 2

    def __init__(self, num_workers: int) -> None:
        self._held_WD = torch.zeros(num_workers, 0)
        self._holding = [False] * num_workers

    def start_epoch(self) -> None:
        self._holding = [False] * len(self._holding)

    def add(self, rows_bWD: Tensor) -> Differences:
        holding = self._holding[0]
        if rows_bWD.ndim == 4:
            if not holding and rows_bWD.shape[1] % 2 == 0:  # pairs lie within steps
                yield rows_bWD[:, 0::2], rows_bWD[:, 1::2]
                return
            rows_bWD = rows_bWD.flatten(0, 1)
        if holding:
            yield self._held_WD[None], rows_bWD[:1]
        start, turns = int(holding), rows_bWD.shape[0]
        paired = start + (turns - start) // 2 * 2
        if paired > start:
            yield rows_bWD[start:paired:2], rows_bWD[start + 1 : paired : 2]
        if paired < turns:
            self._make_room(rows_bWD)
            self._held_WD.copy_(rows_bWD[paired])
        self._holding = [paired < turns] * len(self._holding)

    def add_one(self, row_D: Tensor, worker: int) -> Differences:
        if self._holding[worker]:
            yield self._held_WD[None, worker, None], row_D[None, None]
        else:
            self._make_room(row_D)
            self._held_WD[worker].copy_(row_D)
        self._holding[worker] = not self._holding[worker]

    @property
    def in_step(self) -> bool:
        return len(set(self._holding)) == 1

    def state_dict(self) -> dict[str, Any]:
        # Only rows that wait for a partner are state; the others are left over from earlier pairs.
        waiting_W = torch.tensor(self._holding)
        return {"held": self._held_WD[waiting_W.to(self._held_WD.device)], "holding": waiting_W}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        held_hD, waiting_W = state["held"], state["holding"]
        self._held_WD = held_hD.new_zeros(len(waiting_W), held_hD.shape[1])
        self._held_WD[waiting_W.to(held_hD.device)] = held_hD
        self._holding = waiting_W.tolist()

    def _make_room(self, rows: Tensor) -> None:
        if self._held_WD.shape[1] != rows.shape[-1]:
            self._held_WD = rows.new_zeros(len(self._holding), rows.shape[-1])


class MeanCentred:
    """MeanBalance: each row minus its worker's mean row of the epoch before (zero in the first epoch).

    The mean is per worker: a unit only ever changes places with units of its own worker, so what all of them
    have in common is the worker's mean, not everybody's.
    """

    units_per_row = 1
    in_step = True

    def __init__(self, num_workers: int) -> None:
        self._mean_WD = torch.zeros(num_workers, 0)
        self._total_WD = torch.zeros(num_workers, 0)
        self._count_W = torch.zeros(num_workers)

    def start_epoch(self) -> None:
        seen_W = self._count_W > 0
        mean_WD = self._total_WD / self._count_W.clamp(min=1)[:, None]
        self._mean_WD = torch.where(seen_W[:, None], mean_WD, self._mean_WD)
        self._total_WD = torch.zeros_like(self._total_WD)
        self._count_W = torch.zeros_like(self._count_W)

    def add(self, rows_bWD: Tensor) -> Differences:
        if rows_bWD.ndim == 4:
            rows_bWD = rows_bWD.flatten(0, 1)
        self._make_room(rows_bWD)
        yield rows_bWD, self._mean_WD.expand_as(rows_bWD)
        # The total is taken of the rows as they came, not of the centred ones.
        finite_bW = _finite(rows_bWD)
        self._total_WD += torch.where(finite_bW[..., None], rows_bWD, 0.0).sum(0)
        self._count_W += finite_bW.sum(0)

    def add_one(self, row_D: Tensor, worker: int) -> Differences:
        self._make_room(row_D)
        yield row_D[None, None], self._mean_WD[None, worker, None]
        finite = _finite(row_D)
        self._total_WD[worker] += torch.where(finite, row_D, 0.0)
        self._count_W[worker] += finite

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean_WD.clone(), "total": self._total_WD.clone(), "count": self._count_W.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean_WD, self._total_WD, self._count_W = (state[key].clone() for key in ("mean", "total", "count"))

    def _make_room(self, rows: Tensor) -> None:
        if self._mean_WD.shape[1] != rows.shape[-1]:
            self._mean_WD = rows.new_zeros(len(self._count_W), rows.shape[-1])
            self._total_WD = torch.zeros_like(self._mean_WD)
            self._count_W = rows.new_zeros(len(self._count_W))


def _finite(rows: Tensor) -> Tensor:
    """Whether each row's squared length is finite: the test the balancer applies, without a synchronisation."""
    return torch.isfinite((rows * rows).sum(-1))


CENTRINGS: dict[str, Callable[[int], Centring]] = {"pair": PairDifferences, "mean": MeanCentred}

"""Short rows for single examples: every layer's factors, projected before they are multiplied.

The gradient `sum_t outer(b_t, a_t)` of a layer, projected from both sides, is `sum_t outer(B b_t, A a_t)`, a small
matrix; the small matrices of all layers, end to end, are the row. `A` and `B` are either random, the same on all ranks,
or the leading directions of `a` and `b`, gathered over an epoch. Until that epoch is over they are random.

A layer gets numbers in proportion to the square root of its size: in proportion to the size itself, the largest layer
would get nearly all of them. What fits is kept as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.ghost.records import Lookup, Matrix, Record, Rows
from cdgrab.units import generator

Side = tuple[str, str]  # parameter, and "a" or "b"


class Sketcher:
    """Turns the records of a batch into short rows.

    Args:
        shapes: Of the parameters, by name.
        length: About how many numbers a row is to have.
        fitted: Whether projections follow the data; they are fitted after the first epoch and every `refresh` epochs.
        refresh: See there.
        seed: Of random projections.
        group: Ranks that must use the same projections; None for one process.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        length: int,
        *,
        fitted: bool,
        refresh: int = 5,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._shapes = shapes
        self._fitted = fitted
        self._refresh = refresh
        self._seed = seed
        self._group = group
        self._epoch = 0
        self._length = _shares(shapes, length)
        self._projections: dict[Side, Tensor] = {}
        self._moments: dict[Side, Tensor] = {}

    def __call__(self, records: dict[str, Record], epoch: int) -> Tensor:
        """Rows of a batch that belongs to `epoch`."""
        if epoch != self._epoch:
            if self._moments:
                self._fit()
            self._epoch = epoch
        gathering = self._fitted and self._epoch % self._refresh == 0
        num, like = _some(records)
        parts = []
        for name, length in self._length.items():
            record = records.get(name)
            parts.append(
                like.new_zeros(num, self._width(name))
                if record is None
                else self._short(name, record, length, gathering)
            )
        return torch.cat(parts, dim=1)

    def _short(self, name: str, record: Record, length: int, gathering: bool) -> Tensor:
        numel = self._shapes[name].numel()
        if numel <= length:
            return record.rows()
        if len(self._shapes[name]) == 1 or isinstance(record, Rows):
            rows_ND = record.rows()
            if gathering and numel <= _MOST_FITTED:
                self._gather((name, "a"), rows_ND)
            return rows_ND @ self._projection((name, "a"), length, numel, rows_ND).T
        q, p = self._sides(name)
        kb, ka = self._split(name)
        if isinstance(record, Lookup):
            a_NTq, b_NTk = record.b_NTq, self._projection((name, "b"), kb, q, record.b_NTq).T[record.index_NT]
        else:
            assert isinstance(record, Matrix)
            a_NTq = record.a_NTp
            b_NTk = record.b_NTq @ self._projection((name, "b"), kb, q, record.b_NTq).T
            if gathering:
                self._gather((name, "b"), record.b_NTq.flatten(0, 1))
        if gathering:
            self._gather((name, "a"), a_NTq.flatten(0, 1))
        a_NTk = a_NTq @ self._projection((name, "a"), ka, p, a_NTq).T
        return (b_NTk.mT @ a_NTk).flatten(1)

    def _sides(self, name: str) -> tuple[int, int]:
        q = self._shapes[name][0]
        return q, self._shapes[name].numel() // q

    def _split(self, name: str) -> tuple[int, int]:
        """How many directions of each side."""
        q, p = self._sides(name)
        side = math.isqrt(self._length[name])
        kb = min(q, max(1, side))
        return kb, min(p, max(1, self._length[name] // kb))

    def _width(self, name: str) -> int:
        numel, length = self._shapes[name].numel(), self._length[name]
        if numel <= length:
            return numel
        return length if len(self._shapes[name]) == 1 else math.prod(self._split(name))

    def _projection(self, side: Side, rows: int, columns: int, like: Tensor) -> Tensor:
        if side not in self._projections:
            number = list(self._shapes).index(side[0])
            draws = generator(self._seed, 2 * number + (side[1] == "b"), "sketch").standard_normal((rows, columns))
            self._projections[side] = torch.from_numpy(draws / math.sqrt(rows)).to(like)
        elif self._projections[side].device != like.device:
            self._projections[side] = self._projections[side].to(like.device)
        return self._projections[side]

    def _gather(self, side: Side, vectors_Md: Tensor) -> None:
        if side not in self._moments:
            self._moments[side] = vectors_Md.new_zeros(vectors_Md.shape[1], vectors_Md.shape[1])
        self._moments[side].addmm_(vectors_Md.T, vectors_Md)

    def _fit(self) -> None:
        """Leading directions of what has been gathered, by all ranks together; rank 0 finds them for everyone."""
        moments, self._moments = self._moments, {}
        for side, moment_dd in moments.items():
            count = len(self._projections[side])
            if self._group is not None:
                dist.all_reduce(moment_dd, group=self._group)
            if not bool(moment_dd.isfinite().all()):
                continue
            directions_dk = torch.linalg.eigh(moment_dd.double())[1][:, -count:].to(moment_dd.dtype)
            directions = directions_dk.T.contiguous()
            if self._group is not None:
                dist.broadcast(directions, dist.get_global_rank(self._group, 0), group=self._group)
            self._projections[side] = directions

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "projections": {side: tensor.clone() for side, tensor in self._projections.items()},
            "moments": {side: tensor.clone() for side, tensor in self._moments.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._projections = {side: tensor.clone() for side, tensor in state["projections"].items()}
        self._moments = {side: tensor.clone() for side, tensor in state["moments"].items()}


_MOST_FITTED = 4096  # numbers of a row whose second moments are gathered


def _shares(shapes: dict[str, torch.Size], length: int) -> dict[str, int]:
    roots = {name: math.sqrt(shape.numel()) for name, shape in shapes.items()}
    total = sum(roots.values())
    return {name: max(1, round(length * root / total)) for name, root in roots.items()}


def _some(records: dict[str, Record]) -> tuple[int, Tensor]:
    tensor = next(iter(records.values())).tensors[-1]
    return len(tensor), tensor

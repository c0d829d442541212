"""Short rows for single examples: every layer's factors, projected before they are multiplied.

The gradient `sum_t outer(b_t, a_t)` of a layer, projected from both sides, is `sum_t outer(B b_t, A a_t)`, a small
matrix; the small matrices of all layers, end to end, are the row. `A` and `B` are either random, the same on all ranks,
or the leading directions of `a` and `b`, gathered over an epoch. Until that epoch is over they are random.

A layer gets numbers in proportion to the square root of its size: in proportion to the size itself, the largest layer
would get nearly all of them. What fits is kept as it is.
"""

from __future__ import annotations

import itertools
import math
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.balance.tables import has_kernels
from cdgrab.ghost.convolved import Convolved
from cdgrab.ghost.outer import MOST_DIRECTIONS, outer_sums, shortened
from cdgrab.ghost.plan import changed_in_place
from cdgrab.ghost.records import Lookup, Matrix, Record, Summed
from cdgrab.ghost.together import Part, add_short_rows, factors_of, takes, versions
from cdgrab.units import generator

Side = tuple[str, str]  # parameter, and "a" or "b"


class Joined(NamedTuple):
    """Parts of rows, side by side."""

    rows_ND: Tensor
    names: tuple[str, ...]  # of their parameters


class Sketcher:
    """Turns the records of a batch into short rows.

    Args:
        shapes: Of the parameters, by name.
        length: About how many numbers a row is to have; with None all of them, and nothing is given up.
        fitted: Whether projections follow the data; they are fitted after the first epoch and every `refresh` epochs.
        refresh: See there.
        seed: Of random projections.
        group: Ranks that must use the same projections; None for one process.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        length: int | None,
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
        self.whole = length is None
        self._length = {name: s.numel() for name, s in shapes.items()} if length is None else _shares(shapes, length)
        self._sides = {name: _sides(shape) for name, shape in shapes.items()}
        self._sizes = {name: _kept(*self._sides[name], count) for name, count in self._length.items()}
        widths = [math.prod(sizes) for sizes in self._sizes.values()]
        self._start = dict(zip(shapes, itertools.accumulate(widths, initial=0), strict=False))  # columns of rows
        self._projections: dict[Side, Tensor] = {}
        self._moments: dict[Side, Tensor] = {}
        self.parts: dict[str, Tensor] = {}  # of the rows of the batch under way, by parameter
        self._small: list[Part] = []  # likewise, still to be shortened, all together
        self._waiting = 0  # numbers of what these were made of
        self._pieces: list[Joined] = []  # likewise, side by side
        self._columns: dict[tuple[str, ...], Tensor] = {}  # where those of rows are in pieces of these parameters
        self.version = 0  # counts how often projections have been replaced

    def __call__(self, records: dict[str, Record], epoch: int) -> Tensor:
        """Rows of a batch that belongs to `epoch`, from what has been taken of it and the rest, `records`."""
        self.take_late({name: [record] for name, record in records.items()}, epoch)
        parts, self.parts = self.parts, {}
        pieces, self._pieces = self._pieces, []
        small, self._small, self._waiting = self._small, [], 0
        names = tuple(name for piece in pieces for name in piece.names)
        if not parts and len(names) == len(self._shapes) == len(set(names)):
            rows_ND = pieces[0].rows_ND if len(pieces) == 1 else torch.cat([piece.rows_ND for piece in pieces], dim=1)
            return rows_ND if names == tuple(self._shapes) else rows_ND[:, self._columns_of(names, rows_ND.device)]
        for piece in pieces:
            for name, part_Nk in zip(piece.names, piece.rows_ND.split(self._widths(piece.names), 1), strict=True):
                _add(parts, name, part_Nk)
        if small:
            return self._around(parts, small)
        like = next(iter(parts.values()))
        whole = [
            parts[name] if name in parts else like.new_zeros(len(like), math.prod(self._sizes[name]))
            for name in self._shapes
        ]
        return torch.cat(whole, dim=1)

    def _around(self, parts: dict[str, Tensor], small: list[Part]) -> Tensor:
        """Rows, with what small parameters add to these parts."""
        for part in small:
            if not part.is_unchanged:
                raise changed_in_place(part.name)
        width = sum(math.prod(sizes) for sizes in self._sizes.values())
        types = [part.a.dtype for part in small] + [part_Nk.dtype for part_Nk in parts.values()]
        rows_ND = small[0].a.new_zeros(len(small[0].a), width, dtype=reduce(torch.promote_types, types))
        for name, part_Nk in parts.items():
            rows_ND[:, self._start[name] : self._start[name] + part_Nk.shape[1]] = part_Nk
        add_short_rows(small, rows_ND)
        return rows_ND

    def add_piece(self, piece: Joined) -> None:
        """To the rows of the batch under way; it must not change until they are asked for."""
        self._pieces.append(piece)

    def joined(self, parts: dict[str, Tensor]) -> Joined:
        """Parts of rows as a piece of them."""
        names = tuple(name for name in self._shapes if name in parts)
        return Joined(torch.cat([parts[name] for name in names], dim=1) if names else torch.zeros(0, 0), names)

    def take(self, name: str, record: Record, epoch: int, parts: dict[str, Tensor] | None = None) -> bool:
        """Shorten a record of the batch under way, as soon as it is there; nothing of it need be kept then.

        Args:
            name: Of the parameter.
            record: Of it.
            epoch: The batch's.
            parts: Where to; by default to those of the batch.

        Returns:
            Whether that was done. With the first batch of an epoch it is not: before it, projections may be fitted,
            for which ranks meet. Nor is it while directions are gathered: what breaks off is not to count.
        """
        if not self.settled(epoch):
            return False
        self._add(name, record, parts)
        return True

    def settled(self, epoch: int) -> bool:
        """Whether records of a batch of `epoch` are shortened as they come (`take`), all in the same way."""
        return epoch == self._epoch and not self._gathering

    def take_late(self, records: dict[str, list[Record]], epoch: int) -> None:
        """Shorten what has been kept, once the batch is complete; where one epoch ends, begin the next."""
        for name, parts in records.items():
            self.begin(epoch, parts[0].tensors[-1])
            for record in parts:
                self._add(name, record)

    def drop(self) -> None:
        """The batch under way broke off."""
        self.parts.clear()
        self._small, self._waiting = [], 0
        self._pieces.clear()

    def begin(self, epoch: int, like: Tensor) -> bool:
        """Go on to `epoch`, if it is another one, with `like` for the device and type of projections.

        Returns:
            Whether batches are from now on treated otherwise than before.
        """
        if epoch == self._epoch:
            return False
        gathered, self._epoch = self._gathering, epoch
        if gathered:  # asked alike on all ranks: fitting takes collectives
            self._fit(like)
        return gathered or self._gathering

    def forget(self) -> None:
        """As if the epoch under way had had no batch yet."""
        for moment_dd in self._moments.values():
            moment_dd.zero_()

    @property
    def _gathering(self) -> bool:
        return self._fitted and self._epoch % self._refresh == 0

    def _add(self, name: str, record: Record, parts: dict[str, Tensor] | None = None) -> None:
        small = self._small_part(name, record) if parts is None and not self._gathering else None
        if small is not None:
            self._small.append(small)
            return
        _add(self.parts if parts is None else parts, name, self._short(name, record, self._gathering))

    def _small_part(self, name: str, record: Record) -> Part | None:
        """What is done with a record, if that is little, and can be done together with others."""
        factors, (q, p), (m, k) = factors_of(record), self._sides[name], self._sizes[name]
        if factors is None or not takes(*factors, (p, q, k, m)):
            return None
        a, b = factors
        waiting = self._waiting + a.numel() + (0 if b is None else b.numel())
        if waiting > _MOST_WAITING:
            return None
        self._waiting = waiting
        right, left = self._unless_whole((name, "a"), p, a), self._unless_whole((name, "b"), q, a)
        return Part(name, a, b, right, left, (p, q, k, m), self._start[name], versions(a, b))

    def _short(self, name: str, record: Record, gathering: bool) -> Tensor:
        sizes, (q, p) = self._sizes[name], self._sides[name]
        if math.prod(sizes) == self._shapes[name].numel():
            return record.rows()
        if isinstance(record, Convolved) and not gathering:
            return record.projected(
                self._projection((name, "a"), sizes[1], p, record.x), self._unless_whole((name, "b"), q, record.grad)
            ).flatten(1)
        if (
            isinstance(record, Summed)
            and not gathering
            and has_kernels(*record.tensors)
            and sizes[1] <= MOST_DIRECTIONS
        ):
            vectors_NTp = record.vectors_NTp
            ones = vectors_NTp.new_ones(1, 1, 1).expand(*vectors_NTp.shape[:2], 1)
            return outer_sums(ones, None, vectors_NTp, self._unless_whole((name, "a"), p, vectors_NTp)).flatten(1)
        if gathering or not isinstance(record, Matrix):
            record = record.compact()  # directions of rows, where there are rows, are the better ones
        if isinstance(record, Lookup):
            a_NTp = record.b_NTq
            if gathering:
                self._gather((name, "a"), a_NTp)
            b_NTk = self._projection((name, "b"), sizes[0], q, a_NTp).T[record.index_NT]
            return outer_sums(b_NTk, None, a_NTp, self._unless_whole((name, "a"), p, a_NTp)).flatten(1)
        if isinstance(record, Matrix):
            a_NTp, b_NTq = record.a_NTp, record.b_NTq
            if gathering:
                self._gather((name, "b"), b_NTq)
                self._gather((name, "a"), a_NTp)
        else:
            rows_Nqp = record.rows().view(-1, q, p)
            if gathering:
                self._gather((name, "b"), rows_Nqp.mT)
                self._gather((name, "a"), rows_Nqp)
            right_Nqk = shortened(rows_Nqp, self._unless_whole((name, "a"), p, rows_Nqp))
            left_mq = self._unless_whole((name, "b"), q, rows_Nqp)
            if left_mq is not None:
                right_Nqk = outer_sums(left_mq.T.expand(len(rows_Nqp), -1, -1), None, right_Nqk, None)
            return right_Nqk.flatten(1)
        left, right = self._unless_whole((name, "b"), q, b_NTq), self._unless_whole((name, "a"), p, a_NTp)
        return outer_sums(b_NTq, left, a_NTp, right).flatten(1)

    def _unless_whole(self, side: Side, width: int, like: Tensor) -> Tensor | None:
        """The projection of a side of which something is given up."""
        count = self._sizes[side[0]][side[1] == "a"]
        return None if count == width else self._projection(side, count, width, like)

    def _widths(self, names: tuple[str, ...]) -> list[int]:
        return [math.prod(self._sizes[name]) for name in names]

    def _columns_of(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        columns = self._columns.get(names)
        if columns is None or columns.device != device:
            widths = self._widths(names)
            places = torch.arange(sum(widths)).split(widths)
            parts = dict(zip(names, places, strict=True))
            columns = self._columns[names] = torch.cat([parts[name] for name in self._shapes]).to(device)
        return columns

    def _projection(self, side: Side, rows: int, columns: int, like: Tensor) -> Tensor:
        if side not in self._projections and rows == columns:
            self._projections[side] = torch.eye(rows).to(like)  # nothing is given up on this side
        elif side not in self._projections:
            number = list(self._shapes).index(side[0])
            draws = generator(self._seed, 2 * number + (side[1] == "b"), "sketch").standard_normal((rows, columns))
            self._projections[side] = torch.from_numpy(draws / math.sqrt(rows)).to(like)
        elif self._projections[side].device != like.device:
            self._projections[side] = self._projections[side].to(like.device)
            self.version += 1
        return self._projections[side]

    def _gather(self, side: Side, vectors: Tensor) -> None:
        """Second moments; of a side too long for that, none: it stays random."""
        width = vectors.shape[-1]
        if width > _MOST_FITTED:
            return
        vectors_Md = vectors.reshape(-1, width)
        vectors_Md = torch.where(vectors_Md.isfinite().all(1, keepdim=True), vectors_Md, 0.0)
        moment_dd = self._moments.get(side, vectors.new_zeros(width, width)).to(vectors.device)
        self._moments[side] = moment_dd.addmm_(vectors_Md.T, vectors_Md)

    def _fit(self, like: Tensor) -> None:
        """Leading directions of what all ranks have gathered; rank 0 finds them for everyone."""
        moments, self._moments = self._moments, {}
        self.version += 1
        for name in self._shapes:
            if math.prod(self._sizes[name]) == self._shapes[name].numel():
                continue
            # The same collectives on all ranks, whatever each of them has seen.
            for key, width, count in zip(("b", "a"), self._sides[name], self._sizes[name], strict=True):
                if width > _MOST_FITTED or width == count:
                    continue
                moment_dd = moments.get((name, key), like.new_zeros(width, width)).to(like.device)
                if self._group is not None:
                    dist.all_reduce(moment_dd, group=self._group)
                directions = like.new_zeros(count, width)
                if self._group is None or dist.get_rank(self._group) == 0:
                    directions = torch.linalg.eigh(moment_dd.double())[1][:, -count:].T.to(like.dtype).contiguous()
                if self._group is not None:
                    dist.broadcast(directions, dist.get_global_rank(self._group, 0), group=self._group)
                if bool(moment_dd.any()):
                    self._projections[name, key] = directions

    def state_dict(self) -> dict[str, Any]:
        return {
            "length": self._length,
            "epoch": self._epoch,
            "projections": {side: tensor.clone() for side, tensor in self._projections.items()},
            "moments": {side: tensor.clone() for side, tensor in self._moments.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["length"] != self._length:
            raise ValueError("the state was taken with sketches of another length; attach the model with that length")
        self._epoch = state["epoch"]
        self.version += 1
        self._projections = {side: tensor.clone() for side, tensor in state["projections"].items()}
        self._moments = {side: tensor.clone() for side, tensor in state["moments"].items()}


_MOST_WAITING = 1 << 20  # numbers, of inputs and output gradients that are to be shortened together
_MOST_FITTED = 4096  # numbers of an input or output gradient whose second moments are gathered


def _add(parts: dict[str, Tensor], name: str, part_Nk: Tensor) -> None:
    parts[name] = parts[name] + part_Nk if name in parts else part_Nk


def _sides(shape: torch.Size) -> tuple[int, int]:
    """A parameter as a matrix; one of a single dimension has one output."""
    q = shape[0] if len(shape) > 1 and shape.numel() else 1
    return q, shape.numel() // q


def _kept(q: int, p: int, length: int) -> tuple[int, int]:
    """How many directions of each side are kept, to have about `length` numbers."""
    if q * p <= length:
        return q, p
    kb = min(q, max(1, math.isqrt(length)))
    return kb, min(p, max(1, length // kb))


def _shares(shapes: dict[str, torch.Size], length: int) -> dict[str, int]:
    roots = {name: math.sqrt(shape.numel()) for name, shape in shapes.items()}
    total = sum(roots.values())
    return {name: max(1, round(length * root / total)) for name, root in roots.items()}

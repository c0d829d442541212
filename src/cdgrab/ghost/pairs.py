"""What is done with the pairs of two turns: a table for each block of them, and their part of the running sum.

A table comes from the factors of layers, or, where these have many positions, from rows that are written out for a few
pairs at a time. Then the running sum needs no products of its own: it takes the rows, which are still there.

For every parameter of a model this is a handful of small operations, which on a GPU take longer to launch than to do.
Turns are all alike, so there everything is recorded once, as a CUDA graph, and replayed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cdgrab.balance import tables
from cdgrab.balance.rules import Rule
from cdgrab.ghost.passes import Batch, Pass
from cdgrab.ghost.records import (
    FEW_ROWS,
    MOST_NUMBERS_OF_ROWS,
    Lookup,
    Matrix,
    Pair,
    Record,
    Rows,
    mostly_rows,
    subtracted,
    write_rows,
)
from cdgrab.graphs import Copies, recording

# In a table of more pairs most inner products are between pairs that are far apart. They cost more than another launch,
# and Triton's kernels do not take more.
_BLOCK_ON_GPU = 64
_ROWS_ON_GPU = 16, 8, FEW_ROWS  # that are written out: so many if they take no more memory than the records do,
_MOST_NUMBERS_ON_GPU = 1 << 28, 1 << 29  # otherwise so many if they have no more numbers than this
_SMALL = 1 << 16  # numbers of a parameter whose rows are put in place together with others
MOST_BYTES = 1 << 31  # of two turns that are copied to be replayed; larger models keep a GPU busy as it is


class RunningSum:
    """The running sum of a model: a part for each parameter, and all of them in one vector if they are of one type."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.flat_D: Tensor | None = None
        self.small: list[str] = []  # parameters that are last in it, and whose rows are put in place together

    def make_room(self, batch: Batch, shapes: dict[str, torch.Size]) -> bool:
        """For these records, of parameters of these shapes; says whether anything has another place then."""
        types = {name: record.tensors[-1] for name, record in batch.items()}
        new = {
            name: like for name, like in types.items() if name not in self.parts or self.parts[name].dtype != like.dtype
        }
        if not new:
            return False
        before, like = self.parts, next(iter(new.values()))
        if len({part.dtype for part in (*new.values(), *(before[name] for name in before.keys() - new.keys()))}) > 1:
            self.flat_D, self.small = None, []
            self.parts = before | {name: like.new_zeros(shapes[name]) for name, like in new.items()}
            return True
        # What is put in place together lies together, at the end; vectors last.
        small = {name for name, record in batch.items() if _is_small(record)}
        names = sorted(shapes, key=lambda name: (name in small, name not in batch, len(shapes[name]) == 1))
        self._lay_out({name: shapes[name] for name in names}, [name for name in names if name in small], like)
        for name in before.keys() - new.keys():
            self.parts[name].copy_(before[name])
        return True

    def load(self, parts: dict[str, Tensor]) -> None:
        self.parts, self.flat_D, self.small = {}, None, []
        if len({part.dtype for part in parts.values()}) == 1:
            names = list(parts)
            while names and parts[names[-1]].ndim == 1 and parts[names[-1]].numel() <= _SMALL:
                self.small.insert(0, names.pop())
            self._lay_out({name: p.shape for name, p in parts.items()}, self.small, next(iter(parts.values())))
        for name, part in parts.items():
            if name in self.parts:
                self.parts[name].copy_(part)
            else:
                self.parts[name] = part.clone()

    def _lay_out(self, shapes: dict[str, torch.Size], small: list[str], like: Tensor) -> None:
        """All at zero, one after the other."""
        self.flat_D = like.new_zeros(sum(shape.numel() for shape in shapes.values()))
        parts = self.flat_D.split([shape.numel() for shape in shapes.values()])
        self.parts = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        self.small = small

    def zero_(self) -> None:
        for part in self.parts.values():
            part.zero_()


def _is_small(record: Record) -> bool:
    return isinstance(record, Rows) and record.rows_ND.shape[1] <= _SMALL


class Work(Protocol):
    """The pairs of a turn, block by block: a block's table, then its part of the running sum, then the next block."""

    def __len__(self) -> int: ...

    def table(self, block: int) -> Tensor:
        """As `table` below."""

    def add(self, block: int, weights_K: Tensor) -> None:
        """Add the pairs of the block, each times its weight, to the running sum."""


def difference(first: Batch, second: Batch) -> Batch:
    """Example by example, parameter by parameter."""
    return {name: subtracted(first.get(name), second.get(name)) for name in first | second}


def table(batch: Batch, running_sum: dict[str, Tensor]) -> Tensor:
    """`K x (K + 1)`: inner products of the records with each other and with the running sum, in float64."""
    sum_KK1: Tensor | None = None
    for name, record in batch.items():
        gram_KK, dots_K = record.products(running_sum[name])
        table_KK1 = torch.cat([gram_KK, dots_K[:, None]], dim=1).double()
        sum_KK1 = table_KK1 if sum_KK1 is None else sum_KK1.add_(table_KK1)
    assert sum_KK1 is not None
    sum_KK1.diagonal().clamp_(min=0)  # of nearly identical examples, rounding may leave less than nothing
    return sum_KK1


class Pairs:
    """Work with records, layer by layer."""

    def __init__(self, pairs: Batch, running_sum: RunningSum) -> None:
        self._running_sum = running_sum.parts
        some = _some(pairs)
        size = _BLOCK_ON_GPU if some.is_cuda else len(some)
        self._blocks = [
            {name: _between(record, start, start + size) for name, record in pairs.items()}
            for start in range(0, len(some), size)
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    def table(self, block: int) -> Tensor:
        return table(self._blocks[block], self._running_sum)

    def add(self, block: int, weights_K: Tensor) -> None:
        for name, record in self._blocks[block].items():
            running_sum = self._running_sum[name]
            record.add_to(running_sum, weights_K.to(running_sum.dtype))


class RowPairs:
    """Work with rows, `size` of them at a time; the running sum must be one vector."""

    def __init__(self, pairs: Batch, running_sum: RunningSum, size: int) -> None:
        assert running_sum.flat_D is not None
        self._flat_D, self._size = running_sum.flat_D, size
        self._num, dim = len(_some(pairs)), len(self._flat_D)
        # Every row begins where it can be read fast.
        self._place_KD = self._flat_D.new_zeros(min(size, self._num), -(-dim // 32) * 32)[:, :dim]
        widths = {name: part.numel() for name, part in running_sum.parts.items()}
        columns = dict(zip(widths, self._place_KD.split(list(widths.values()), 1), strict=True))
        sums = dict(zip(widths, self._flat_D.split(list(widths.values())), strict=True))
        self._written = [(columns[name], sums[name], pairs[name]) for name in pairs if name not in running_sum.small]
        # Of parameters without a gradient, all columns stay zero.
        self._small_Nd = None
        if any(widths[name] for name in running_sum.small):
            none = self._flat_D.new_zeros(1, 1)
            self._small_Nd = torch.cat(
                [
                    pairs[name].rows() if name in pairs else none.expand(self._num, widths[name])
                    for name in running_sum.small
                ],
                dim=1,
            )

    def __len__(self) -> int:
        return -(-self._num // self._size)

    def table(self, block: int) -> Tensor:
        start, rows_KD = block * self._size, self._rows(block)
        found: list[Tensor] = []
        for columns, r_d, record in self._written:
            here = _between(record, start, start + self._size)
            rows_Kd = columns[: len(rows_KD)]
            write_rows([here.joined() if isinstance(here, Pair) else here], rows_Kd)
            if not rows_KD.is_cuda:  # while they are in cache
                found.append(tables.table(rows_Kd, None, r_d))
        if self._small_Nd is not None:
            width = self._small_Nd.shape[1]
            rows_KD[:, -width:] = self._small_Nd[start : start + len(rows_KD)]
            if not rows_KD.is_cuda:
                found.append(tables.table(rows_KD[:, -width:], None, self._flat_D[-width:]))
        return torch.stack(found).sum(0) if found else tables.table(rows_KD, None, self._flat_D)

    def add(self, block: int, weights_K: Tensor) -> None:
        tables.advance(self._flat_D, self._rows(block), None, weights_K)

    def _rows(self, block: int) -> Tensor:
        return self._place_KD[: min(self._size, self._num - block * self._size)]


def work_of(pairs: Batch, running_sum: RunningSum) -> Work:
    """The cheaper of both."""
    size = _rows_at_a_time(pairs, running_sum)
    return RowPairs(pairs, running_sum, size) if size else Pairs(pairs, running_sum)


def _rows_at_a_time(pairs: Batch, running_sum: RunningSum) -> int:
    """How many rows are written out at a time; none where factors cost less, or rows are too long."""
    flat_D = running_sum.flat_D
    if flat_D is None:
        return 0
    by_factors = 0
    for name, record in pairs.items():
        here = _between(record, 0, _BLOCK_ON_GPU)
        pair = Pair(here, None) if isinstance(here, Matrix) else here
        if isinstance(pair, Pair) and pair.prefers_factors():
            by_factors += running_sum.parts[name].numel()
    if not mostly_rows(by_factors, len(flat_D)):
        return 0
    if not flat_D.is_cuda:  # more of them are not faster, and what few take may still be in cache
        return FEW_ROWS if FEW_ROWS * len(flat_D) <= MOST_NUMBERS_OF_ROWS else 0
    most, fewer, fewest = _ROWS_ON_GPU
    of_a_pass = sum(t.numel() for r in pairs.values() for t in r.tensors[: 2 if isinstance(r, Pair) else None])
    if most * len(flat_D) <= of_a_pass:
        return most
    if fewer * len(flat_D) <= _MOST_NUMBERS_ON_GPU[0]:
        return fewer
    return fewest if fewest * len(flat_D) <= _MOST_NUMBERS_ON_GPU[1] else 0


def balance(work: Work, rule: Rule) -> Tensor:
    """Decide the signs of all pairs and add them to the running sum. `4 x N`, as `tables.decide`."""
    decided = []
    for block in range(len(work)):
        decided.append(tables.decide(work.table(block), rule))
        work.add(block, decided[-1][1])
    return decided[0] if len(decided) == 1 else torch.cat(decided, dim=1)


class ReplayedPairs:
    """Pairs of passes that are always alike, recorded.

    Args:
        first: A pass; what comes later must be like it (`fits`). What its layers saw has been copied home, its records
            are copied here.
        second: The next.
        running_sum: Is changed in place, and must stay where it is.
        rule: With thresholds that are always the same.
    """

    def __init__(self, first: Pass, second: Pass, running_sum: RunningSum, rule: Rule) -> None:
        self.first, self._second = first.with_copied_parts(), second.with_copied_parts()
        self._running_sum, self._rule = running_sum, rule
        self._graph: torch.cuda.CUDAGraph | None = None
        self._decided_4N: Tensor | None = None
        self._thresholds: list[Tensor] = []  # which the graph reads

    def take_first(self, coming: Pass) -> bool:
        """Take a pass whose partners are still to come, unless it is of another kind."""
        return self._take(coming, self.first)

    def take_second(self, coming: Pass) -> Tensor | None:
        """Balance the first pass with this one; `4 x N`, as `tables.decide`. None if it is of another kind."""
        if not self._take(coming, self._second):
            return None
        if self._graph is None or self._decided_4N is None:
            return self.balance()
        self._graph.replay()
        return self._decided_4N.clone()

    def _take(self, coming: Pass, into: Pass) -> bool:
        if not coming.fits(into):
            return False
        if coming.parts:
            come = coming.tensors_of_parts
            Copies(into.tensors_of_parts, come)(come)
        return True

    def balance(self) -> Tensor:
        """What is recorded."""
        pairs = difference(self.first.records(), self._second.records())
        return balance(work_of(pairs, self._running_sum), self._rule)

    def record(self) -> None:
        """After pairs have been balanced: kernels are loaded then."""
        device = self.first.tensors[0].device
        self._thresholds = [tables.zeros(count, device) for count in range(1, _BLOCK_ON_GPU + 1)]
        graph = torch.cuda.CUDAGraph()
        with recording(graph, device):
            self._decided_4N = self.balance()
        self._graph = graph


def replayable(first: Pass, second: Pass, running_sum: RunningSum) -> bool:
    """Whether turns like these can be recorded, and are better for it."""
    if not (small_enough(first) and small_enough(second)) or first.kind != second.kind:
        return False
    if torch.cuda.is_current_stream_capturing():  # somebody records the whole step
        return False
    pairs = difference(first.records(), second.records())
    lookups = [record for record in pairs.values() if isinstance(record, Lookup)]
    return all(record.dense for record in lookups) or _rows_at_a_time(pairs, running_sum) > 0


def small_enough(one: Pass) -> bool:
    """To be copied, with another like it, on a GPU."""
    if not all(tensor.is_cuda for tensor in one.tensors):
        return False
    return 2 * max(one.size, sum(tensor.nbytes for tensor in one.tensors_of_parts)) <= MOST_BYTES


def _some(pairs: Batch) -> Tensor:
    return next(iter(pairs.values())).tensors[-1]


def _between(record: Record, start: int, stop: int) -> Record:
    """Some of the examples, which are not copied for it."""
    return record.like(tuple(tensor[start:stop] for tensor in record.tensors))

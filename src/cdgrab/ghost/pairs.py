"""What is done with the pairs of a turn: a table for each block of them, and their part of the running sum.

For every parameter of a model this is a handful of small operations, which on a GPU take longer to launch than to do.
Turns are all alike, so there they are recorded once, as CUDA graphs, and replayed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cdgrab.ghost.records import Lookup, Record, subtracted
from cdgrab.graphs import at_home, copy_all, recording

Batch = dict[str, Record]  # by the name of the parameter

# In a table of more pairs most inner products are between pairs that are far apart. They cost more than another launch,
# and Triton's kernels do not take more.
_BLOCK_ON_GPU = 64
_MOST_BYTES = 1 << 31  # of two turns' records that are copied to be replayed; larger models keep a GPU busy as it is


class Work(Protocol):
    """The pairs of a turn, block by block: a block's table, then its part of the running sum, then the next block."""

    def __len__(self) -> int: ...

    def table(self, block: int) -> Tensor:
        """As `table` below; valid until the next pairs come."""

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
    """Work that is done when it is asked for."""

    def __init__(self, pairs: Batch, running_sum: dict[str, Tensor]) -> None:
        self._running_sum = running_sum
        some = next(iter(pairs.values())).tensors[-1]
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


class ReplayedPairs:
    """The same for pairs that are always alike, recorded on copies of their records.

    Args:
        first: Records of one turn; what comes later must fit them (`fits`).
        second: Of the next.
        running_sum: Is changed in place, and must stay where it is.
    """

    def __init__(self, first: Batch, second: Batch, running_sum: dict[str, Tensor]) -> None:
        self.first, self.second = _copied(first), _copied(second)
        self._signature = _signature(first)
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor, torch.cuda.CUDAGraph, Tensor]] = []
        self._record(running_sum)

    def _record(self, running_sum: dict[str, Tensor]) -> None:
        device = next(iter(running_sum.values())).device
        pairs: Pairs | None = None
        pool = torch.cuda.graph_pool_handle()
        while pairs is None or len(self._graphs) < len(pairs):
            tables, adds = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with recording(tables, device, pool):
                if pairs is None:
                    pairs = Pairs(difference(self.first, self.second), running_sum)
                table_KK1 = pairs.table(len(self._graphs))
            weights_K = torch.zeros_like(table_KK1[:, 0])
            with recording(adds, device, pool):
                pairs.add(len(self._graphs), weights_K)
            self._graphs.append((tables, table_KK1, adds, weights_K))

    def fits(self, batch: Batch) -> bool:
        return _signature(batch) == self._signature

    def take(self, batch: Batch, into: Batch) -> None:
        """Copy the records of a turn to `first` or `second`."""
        copy_all(
            both for name, record in into.items() for both in zip(record.tensors, batch[name].tensors, strict=True)
        )

    def __len__(self) -> int:
        return len(self._graphs)

    def table(self, block: int) -> Tensor:
        tables, table_KK1, _, _ = self._graphs[block]
        tables.replay()
        return table_KK1

    def add(self, block: int, weights_K: Tensor) -> None:
        _, _, adds, here_K = self._graphs[block]
        here_K.copy_(weights_K)
        adds.replay()


def replayable(first: Batch, second: Batch) -> bool:
    """Whether turns like these can be recorded, and are better for it."""
    tensors = [tensor for record in first.values() for tensor in record.tensors]
    return (
        all(tensor.is_cuda for tensor in tensors)
        and 2 * sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES
        and all(not isinstance(record, Lookup) or record.dense for record in first.values())
        and _signature(first) == _signature(second)
        and not torch.cuda.is_current_stream_capturing()  # somebody records the whole step
    )


def _between(record: Record, start: int, stop: int) -> Record:
    """Some of the examples, which are not copied for it."""
    return record.like(tuple(tensor[start:stop] for tensor in record.tensors))


def _signature(batch: Batch) -> list[object]:
    return [
        (name, type(record), [(t.shape, t.dtype, t.device) for t in record.tensors]) for name, record in batch.items()
    ]


def _copied(batch: Batch) -> Batch:
    return {name: record.like(tuple(map(at_home, record.tensors))) for name, record in batch.items()}

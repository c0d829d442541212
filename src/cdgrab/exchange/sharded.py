"""Exact coordination at the price of an all-reduce.

An all-reduce is a reduce-scatter followed by an all-gather. Replace the reduce-scatter by an all-to-all: the same bytes
leave every rank, but rank `i` now holds *every* worker's slice `i` instead of their sum. It can still add them up, for
the averaged gradient that training wants; and it can compute the slice's part of the table of inner products. The
`W x (W + 1)` tables are summed over ranks with one tiny all-reduce, and every rank knows every sign.

The table of a pair is under way while the next step computes: it is waited for when the next pair begins.

Shapes: `W` workers, `c` coordinates of a slice.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.balancing.rules import Rule
from cdgrab.balancing.tables import advance, decide, difference_table
from cdgrab.balancing.tally import Tally
from cdgrab.exchange.base import BoolArray
from cdgrab.exchange.gather import Gather
from cdgrab.lanes import IntArray
from cdgrab.orders.decisions import Decided, Decisions


class Sharded:
    """The exchange behind `observe`: turns a row into every worker's slices of this rank's coordinates."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._counts = Gather(group)
        self.bytes_sent = 0

    def collect(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> tuple[Tensor, BoolArray | None]:
        size = dist.get_world_size(self._group)
        rows_mD = rows_mLD[:, 0]
        width = math.ceil(rows_mD.shape[1] / size)
        padded_mWc = torch.nn.functional.pad(rows_mD, (0, width * size - rows_mD.shape[1])).unflatten(1, (size, width))
        # One all-to-all for all turns: the slices of rank 0 first, of all turns, then those of rank 1, and so on.
        sent = padded_mWc.transpose(0, 1).contiguous()
        slices_Wmc = torch.empty_like(sent)
        dist.all_to_all_single(slices_Wmc.view(-1), sent.view(-1), group=self._group)
        self.bytes_sent += sent.numel() * sent.element_size() * (size - 1) // size
        return slices_Wmc.transpose(0, 1), self._counts.gather_counts(rows_mLD, counts_mL)

    def share(self, decided: Decided) -> Decided:
        return decided

    def add_up(self, table: Tensor) -> dist.Work | None:
        """Start to sum tables over ranks, in place."""
        size = dist.get_world_size(self._group)
        self.bytes_sent += 2 * table.numel() * table.element_size() * (size - 1) // size
        work: dist.Work | None = dist.all_reduce(table, group=self._group, async_op=True)
        return work


class ShardedPairs:
    """PairBalance on slices: a sorter that never holds a whole row.

    Slices come in named pieces, so that a bucket or a wrapped module can be handed over as soon as it is there. For the
    first of a pair a piece is written straight into the store; for the second it is subtracted from it. Memory: one
    step's slices, `dim` numbers, and this rank's slice of the running sum, `dim / W`.
    """

    def __init__(self, num_workers: int, exchange: Sharded, rule: Rule) -> None:
        self._exchange = exchange
        self._num_workers = num_workers
        self._rule = rule
        self.rules = [rule]
        self._tally = Tally()
        self.differences: dict[Any, Tensor] = {}  # piece -> W x c; first rows until the second ones have come
        self.running_sum: dict[Any, Tensor] = {}  # piece -> c
        self._second = False  # whether the turn under way is the second of its pair
        self._paired_W = np.zeros(num_workers, dtype=bool)  # whose first row counted
        self._parts: list[Tensor] = []  # tables of the pieces that have come
        self._table: tuple[dist.Work | None, Tensor, BoolArray] | None = None
        self.decisions = Decisions()

    # Rows

    def room(self, piece: Any, width: int, like: Tensor) -> Tensor | None:
        """For the first of a pair: where the slices of `piece` are to be written. None for the second."""
        if self._second:
            return None
        self.resolve()  # the store still holds the differences of the pair before
        if piece not in self.differences:
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            self.differences[piece] = torch.zeros(self._num_workers, width, dtype=dtype, device=like.device)
            self.running_sum[piece] = torch.zeros(width, dtype=dtype, device=like.device)
        return self.differences[piece]

    def put(self, piece: Any, slices_Wc: Tensor) -> None:
        """Take a piece of this turn. Slices that are already in the room given for them are not copied."""
        room = self.room(piece, slices_Wc.shape[1], slices_Wc)
        if room is None:
            self._parts.append(difference_table(self.differences[piece], slices_Wc, self.running_sum[piece]))
        elif room.data_ptr() != slices_Wc.data_ptr():
            room.copy_(slices_Wc)

    def end_turn(self, counts_W: BoolArray) -> None:
        """All pieces of this turn have come; `counts_W` says whose row is a unit."""
        if not self._second:
            self._paired_W = counts_W
            self._second = True
            return
        self._second = False
        parts, self._parts = self._parts, []
        active_W = counts_W & self._paired_W
        alone = np.flatnonzero(counts_W ^ self._paired_W)  # the other half of the pair is no unit
        self.decisions.append(alone, np.zeros(len(alone), dtype=np.int8))
        if not active_W.any():
            return
        table = torch.stack(parts).sum(0)
        work = self._exchange.add_up(table) if self._num_workers > 1 else None
        self._table = (work, table, active_W)

    def resolve(self) -> None:
        """Decide the signs of the last pair, as soon as the store is needed for the next one."""
        if self._table is None:
            return
        work, table, active_W = self._table
        self._table = None
        if work is not None:
            work.wait()
        index = np.flatnonzero(active_W)
        if not active_W.all():
            table = table[index][:, [*index, self._num_workers]]
        decided_4K = decide(table, self._rule)
        weights_W = decided_4K[1]
        if not active_W.all():
            weights_W = weights_W.new_zeros(self._num_workers)
            weights_W[index] = decided_4K[1]
        for piece, rows_Wc in self.differences.items():
            advance(self.running_sum[piece], rows_Wc, None, weights_W)
        self._tally.add_decided(decided_4K)
        self.decisions.append_pairs(index, decided_4K[0])

    # Sorter

    def start_epoch(self, epoch: int, visits: IntArray) -> None:
        self._table = None
        self._parts = []
        self._second = False
        self.decisions = Decisions()
        self._tally = Tally()
        for running_sum in self.running_sum.values():
            running_sum.zero_()
        self._rule.start_epoch(epoch, int((visits // 2).sum()))

    def add_turn(self, slices_Wc: Tensor, counts_W: BoolArray) -> None:
        """One turn in one piece."""
        self.put("row", slices_Wc)
        self.end_turn(counts_W)

    def close(self) -> None:
        self.resolve()

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        return self.decisions.arrange(worker, visited_N, unvisited_M)

    def tallies(self) -> list[Tally]:
        return [self._tally.settled()]

    def state_dict(self) -> dict[str, Any]:
        self.resolve()
        return {
            "second": self._second,
            "paired": torch.from_numpy(self._paired_W.copy()),
            # Once a pair is complete and decided on, nothing of it is needed but how wide its pieces are.
            "differences": {
                piece: rows[: len(rows) * self._second].clone() for piece, rows in self.differences.items()
            },
            "running_sum": {piece: rows.clone() for piece, rows in self.running_sum.items()},
            "decisions": self.decisions.state_dict(),
            "tally": asdict(self._tally.settled()),
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._table = None
        self._parts = []
        self._second = state["second"]
        self._paired_W = state["paired"].cpu().numpy().copy()
        self.differences = {
            piece: rows.clone() if self._second else rows.new_zeros(self._num_workers, rows.shape[1])
            for piece, rows in state["differences"].items()
        }
        self.running_sum = {piece: rows.clone() for piece, rows in state["running_sum"].items()}
        self.decisions.load_state_dict(state["decisions"])
        self._tally = Tally(**state["tally"])
        self._rule.load_state_dict(state["rule"])

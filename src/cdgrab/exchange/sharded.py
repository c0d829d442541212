"""Exact coordination at the price of an all-reduce.

An all-reduce is a reduce-scatter followed by an all-gather. Replace the reduce-scatter by an all-to-all: the same bytes
leave every rank, but rank `i` now holds *every* lane's slice `i` instead of their sum. It can still add them up, for
the averaged gradient that training wants; and it can compute the slice's part of the table of inner products. The
`L x (L + 1)` tables are summed over ranks with one tiny all-reduce, and every rank knows every sign.

The table of a pair is under way while the next step computes: it is waited for when the next pair begins.

Shapes: `L` lanes, `J` of them on each of `W` ranks, `m` visits, `c` coordinates of a slice.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.balancing.rules import Rule, RuleMaker
from cdgrab.balancing.tables import advance, decide, difference_table
from cdgrab.balancing.tally import Tally
from cdgrab.exchange.gather import Gather, by_lane
from cdgrab.lanes import BoolArray, IntArray
from cdgrab.orders.decisions import Decisions
from cdgrab.orders.fill import next_order, padded


class Sharded(Gather):
    """The exchange behind `observe`: turns a row into every lane's slices of this rank's coordinates."""

    name = "sharded"
    takes_sketches = False
    pairs_only = True

    def collect(self, rows_mJD: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        width = math.ceil(rows_mJD.shape[2] / size)
        padded_mJD = torch.nn.functional.pad(rows_mJD, (0, width * size - rows_mJD.shape[2]))
        # One all-to-all for all visits: the slices of rank 0 first, then those of rank 1, and so on.
        sent_WmJc = padded_mJD.unflatten(2, (size, width)).permute(2, 0, 1, 3).contiguous()
        slices_WmJc = torch.empty_like(sent_WmJc)
        dist.all_to_all_single(slices_WmJc.view(-1), sent_WmJc.view(-1), group=self.group)
        self.bytes_sent += sent_WmJc.numel() * sent_WmJc.element_size() * (size - 1) // size
        return by_lane(list(slices_WmJc))

    def sorter(self, rngs: list[np.random.Generator], make_rule: RuleMaker) -> ShardedPairs:
        return ShardedPairs(len(rngs), self, make_rule(rngs[0]))

    def add_up(self, table: Tensor) -> dist.Work | None:
        """Start to sum tables over ranks, in place."""
        size = dist.get_world_size(self.group)
        self.bytes_sent += 2 * table.numel() * table.element_size() * (size - 1) // size
        work: dist.Work | None = dist.all_reduce(table, group=self.group, async_op=True)
        return work


class ShardedPairs:
    """PairBalance on slices: a sorter that never holds a whole row.

    Slices come in named pieces, so that a bucket or a wrapped module can be handed over as soon as it is there. For the
    first of a pair a piece is written straight into the store; for the second it is subtracted from it. Memory: one
    visit's slices, and this rank's slice of the running sum, `dim / W`.
    """

    def __init__(self, num_lanes: int, exchange: Sharded, rule: Rule) -> None:
        self._exchange = exchange
        self._num_lanes = num_lanes
        self._rule = rule
        self.rules = [rule]
        self._tally = Tally()
        self.differences: dict[Any, Tensor] = {}  # piece -> L x c; first rows until the second ones have come
        self.running_sum: dict[Any, Tensor] = {}  # piece -> c
        self._second = False  # whether the visit under way is the second of its pair
        self._first_L = np.zeros(num_lanes, dtype=bool)  # lanes that had a unit in the first
        self._parts: list[Tensor] = []  # tables of the pieces that have come
        self._table: tuple[dist.Work | None, Tensor, BoolArray] | None = None
        self.decisions = Decisions(num_lanes, paired=True)

    # Rows

    def room(self, piece: Any, width: int, like: Tensor) -> Tensor | None:
        """For the first of a pair: where the slices of `piece` are to be written. None for the second."""
        if self._second:
            return None
        self.resolve()  # the store still holds the differences of the pair before
        if piece not in self.differences:
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            self.differences[piece] = torch.zeros(self._num_lanes, width, dtype=dtype, device=like.device)
            self.running_sum[piece] = torch.zeros(width, dtype=dtype, device=like.device)
        return self.differences[piece]

    def put(self, piece: Any, slices_Lc: Tensor) -> None:
        """Take a piece of this visit. Slices that are already in the room given for them are not copied."""
        room = self.room(piece, slices_Lc.shape[1], slices_Lc)
        if room is None:
            self._parts.append(difference_table(self.differences[piece], slices_Lc, self.running_sum[piece]))
        elif room.data_ptr() != slices_Lc.data_ptr():
            room.copy_(slices_Lc)

    def end_visit(self, counts_L: BoolArray) -> None:
        """All pieces of this visit have come; `counts_L` says which lanes had a unit."""
        if not self._second:
            self._first_L = counts_L
            self._second = True
            return
        self._second = False
        parts, self._parts = self._parts, []
        active_L = counts_L & self._first_L
        if not active_L.any():
            self.resolve()  # signs come in the order of pairs
            self.decisions.append(np.zeros(0, dtype=np.int8), active_L[None])
            return
        table = torch.stack(parts).sum(0)
        work = self._exchange.add_up(table) if self._num_lanes > 1 else None
        self._table = (work, table, active_L)

    def resolve(self) -> None:
        """Decide the signs of the last pair, as soon as the store is needed for the next one."""
        if self._table is None:
            return
        work, table, active_L = self._table
        self._table = None
        if work is not None:
            work.wait()
        index = np.flatnonzero(active_L)
        if not active_L.all():
            table = table[index][:, [*index, self._num_lanes]]
        decided_4K = decide(table, self._rule)
        weights_L = decided_4K[1]
        if not active_L.all():
            weights_L = weights_L.new_zeros(self._num_lanes)
            weights_L[index] = decided_4K[1]
        for piece, rows_Lc in self.differences.items():
            advance(self.running_sum[piece], rows_Lc, None, weights_L)
        self._tally.add_decided(decided_4K)
        self.decisions.append(decided_4K[0], active_L[None])

    # Sorter

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:
        self._table = None
        self._parts = []
        self._second = False
        self.decisions = Decisions(self._num_lanes, paired=True)
        self._tally = Tally()
        for running_sum in self.running_sum.values():
            running_sum.zero_()
        self._rule.start_epoch(epoch, int((visited_L // 2).sum()))

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        """Visits in one piece; of the rows, slices are given."""
        everybody = np.ones(self._num_lanes, dtype=bool)
        for visit, slices_Lc in enumerate(rows_mLD):
            self.put("row", slices_Lc)
            self.end_visit(everybody if counts_mL is None else counts_mL[visit])

    def close(self) -> None:
        self.resolve()

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        return next_order(units_VJ, padded(self.decisions.of_units()[:, lanes], len(units_VJ)))

    def tallies(self) -> list[Tally]:
        return [self._tally.settled()]

    def state_dict(self) -> dict[str, Any]:
        self.resolve()
        return {
            "second": self._second,
            "first": torch.from_numpy(self._first_L.copy()),
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
        self._first_L = state["first"].cpu().numpy().copy()
        self.differences = {
            piece: rows.clone() if self._second else rows.new_zeros(self._num_lanes, rows.shape[1])
            for piece, rows in state["differences"].items()
        }
        self.running_sum = {piece: rows.clone() for piece, rows in state["running_sum"].items()}
        self.decisions.load_state_dict(state["decisions"])
        self._tally = Tally(**state["tally"])
        self._rule.load_state_dict(state["rule"])

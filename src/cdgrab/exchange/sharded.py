"""Exact coordination at the price of an all-reduce.

An all-reduce is a reduce-scatter followed by an all-gather. Replace the reduce-scatter by an all-to-all: the same bytes
leave every rank, but rank `i` now holds *every* lane's slice `i` instead of their sum. Rank `i` adds them up for the
averaged gradient that training needs, and computes the slice's part of the table of inner products. A small all-reduce
sums the `L x (L + 1)` tables over ranks, and every rank decides every sign.

The all-reduce of a pair's table runs beside the next step. The sorter waits for it when the next pair begins.

Shapes: `L` lanes, `J` of them on each of `W` ranks, `m` visits, `c` coordinates of a slice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.balancing.rules import Rule, RuleMaker, load_rule
from cdgrab.balancing.tables import advance, balance, difference_table
from cdgrab.balancing.tally import Tally, Witness
from cdgrab.exchange.base import Exchange
from cdgrab.exchange.collectives import waiting_for
from cdgrab.exchange.gather import Gather, by_lane
from cdgrab.fields import Fields, damaged
from cdgrab.lanes import BoolArray, IntArray
from cdgrab.orders.decisions import Decisions
from cdgrab.orders.fill import next_order, padded


class Sharded(Gather):
    """The exchange behind `observe`: sends rows in slices, and returns every lane's slice that this rank owns."""

    name = "sharded"
    takes_sketches = False
    pairs_only = True
    replicates = False
    start = Exchange.start

    def collect(self, rows_mJD: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        width = math.ceil(rows_mJD.shape[2] / size)
        padded_mJD = torch.nn.functional.pad(rows_mJD, (0, width * size - rows_mJD.shape[2]))
        # One all-to-all for all visits: the slices of rank 0 first, then those of rank 1, and so on.
        sent_WmJc = padded_mJD.unflatten(2, (size, width)).permute(2, 0, 1, 3).contiguous()
        slices_WmJc = torch.empty_like(sent_WmJc)
        with waiting_for("rows", self.group):
            dist.all_to_all_single(slices_WmJc.view(-1), sent_WmJc.view(-1), group=self.group)
        self.bytes_sent += sent_WmJc.numel() * sent_WmJc.element_size() * (size - 1) // size
        return by_lane(list(slices_WmJc))

    def sorter(self, rngs: list[np.random.Generator], make_rule: RuleMaker) -> ShardedPairs:
        return ShardedPairs(len(rngs), self, make_rule(rngs[0]))

    def add_up(self, table: Tensor) -> dist.Work | None:
        """Start an all-reduce that sums a table over ranks, in place."""
        size = dist.get_world_size(self.group)
        self.bytes_sent += 2 * table.numel() * table.element_size() * (size - 1) // size
        work: dist.Work | None = dist.all_reduce(table, group=self.group, async_op=True)
        return work


@dataclass
class StoredSlices:
    """The stored slices of a bucket: first rows of pairs until the second ones have come, then their differences."""

    rows_Lc: Tensor
    running_sum_c: Tensor


@dataclass
class SlicedPairs:
    """The differences of a pair of visits, of which this rank has some coordinates: a `GradientBatch`.

    Attributes:
        summed: Their table, which the all-reduce sums over ranks.
        work: That all-reduce; None if there is nothing to wait for.
        active_L: Lanes that had a unit in both visits.
        group: The ranks.
    """

    summed: Tensor
    work: dist.Work | None
    active_L: BoolArray
    group: dist.ProcessGroup | None

    def table(self, running_sum: Collection[StoredSlices]) -> Tensor:  # noqa: ARG002, `summed` has its products
        if self.work is not None:
            with waiting_for("inner products", self.group):
                self.work.wait()
        if self.active_L.all():
            return self.summed
        index = np.flatnonzero(self.active_L)
        return self.summed[index][:, [*index, len(self.active_L)]]

    def add_to(self, running_sum: Collection[StoredSlices], weights_K: Tensor) -> None:
        weights_L = weights_K
        if not self.active_L.all():
            weights_L = weights_K.new_zeros(len(self.active_L))
            weights_L[np.flatnonzero(self.active_L)] = weights_K
        for stored in running_sum:
            advance(stored.running_sum_c, stored.rows_Lc, None, weights_L)


class ShardedPairs:
    """PairBalance on slices: a sorter that never holds a whole row.

    Slices come bucket by bucket: a bucket of DDP, a wrapped module of FSDP, or a whole row. It stores the slices of the
    first of a pair, and subtracts those of the second from them. Memory: the slices of one visit, and this rank's slice
    of the running sum, `dim / W`.

    Attributes:
        store: The stored slices of every bucket, by its name.
        decisions: The signs so far.
    """

    def __init__(self, num_lanes: int, exchange: Sharded, rule: Rule) -> None:
        self._exchange = exchange
        self._num_lanes = num_lanes
        self._rule = rule
        self._tally = Tally()
        self.store: dict[Any, StoredSlices] = {}
        self._first_L: BoolArray | None = None  # lanes with a unit in the first of a pair; None until its visit ends
        self._tables: list[Tensor] = []  # of the buckets so far
        self._pending: SlicedPairs | None = None
        self.decisions = Decisions(num_lanes, paired=True)

    @property
    def rules(self) -> list[Rule]:
        return [self._rule]

    # Rows

    def room(self, name: Any, width: int, like: Tensor) -> Tensor | None:
        """The tensor to write a bucket's slices into, for the first of a pair; None for the second."""
        if self._first_L is not None:
            return None
        self.resolve()  # the store still holds the differences of the pair before
        if name not in self.store:
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            empty_Lc = torch.zeros(self._num_lanes, width, dtype=dtype, device=like.device)
            self.store[name] = StoredSlices(empty_Lc, torch.zeros_like(empty_Lc[0]))
        return self.store[name].rows_Lc

    def put(self, name: Any, slices_Lc: Tensor) -> None:
        """Take the slices of a bucket. Slices that were written into `room` are not copied."""
        room = self.room(name, slices_Lc.shape[1], slices_Lc)
        if room is None:
            stored = self.store[name]
            if stored.rows_Lc.shape != slices_Lc.shape:  # compiled code would write past the end
                raise ValueError(
                    f"bucket {name} has {slices_Lc.shape[1]} numbers on this rank, and the loaded state has "
                    f"{stored.rows_Lc.shape[1]}; attach the model that was saved"
                )
            self._tables.append(difference_table(stored.rows_Lc, slices_Lc, stored.running_sum_c))
        elif room.data_ptr() != slices_Lc.data_ptr():
            room.copy_(slices_Lc)

    def end_visit(self, counts_L: BoolArray) -> None:
        """End a visit whose buckets have all come; `counts_L` says which lanes had a unit."""
        if self._first_L is None:
            self._first_L = counts_L
            return
        active_L, self._first_L = counts_L & self._first_L, None
        tables, self._tables = self._tables, []
        if not active_L.any():
            self.resolve()  # signs are appended in the order of pairs
            self.decisions.append(np.zeros(0, dtype=np.int8), active_L[None])
            return
        table = torch.stack(tables).sum(0)
        work = self._exchange.add_up(table) if self._num_lanes > 1 else None
        self._pending = SlicedPairs(table, work, active_L, self._exchange.group)

    def resolve(self) -> None:
        """Decide the signs of the last pair; the store is then free for the next one."""
        pairs, self._pending = self._pending, None
        if pairs is not None:
            decided_4K = balance(pairs, self.store.values(), self._rule, self._tally)
            self.decisions.append(decided_4K[0], pairs.active_L[None])

    def lift(self) -> Tensor:
        """Empty the store and return it as `(L + 1) x c`: buckets side by side, running sums in the last row."""
        self.resolve()
        store, self.store = self.store, {}
        return torch.cat([torch.cat([one.rows_Lc, one.running_sum_c[None]]) for one in store.values()], dim=1)

    def lay_down(self, parts: Mapping[Any, Tensor]) -> None:
        """Fill the store with columns that `lift` returned, by the names of new buckets."""
        self.store = {name: StoredSlices(part[:-1].clone(), part[-1].clone()) for name, part in parts.items()}

    # Sorter

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:
        self._pending, self._first_L, self._tables = None, None, []
        self.decisions = Decisions(self._num_lanes, paired=True)
        self._tally = Tally()
        for stored in self.store.values():
            stored.running_sum_c.zero_()
        self._rule.start_epoch(epoch, int((visited_L // 2).sum()))

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        """Take slices of the rows of the next visits; a row is one bucket."""
        all_lanes = np.ones(self._num_lanes, dtype=bool)
        for visit, slices_Lc in enumerate(rows_mLD):
            self.put("row", slices_Lc)
            self.end_visit(all_lanes if counts_mL is None else counts_mL[visit])

    def close(self) -> None:
        self.resolve()

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        return next_order(units_VJ, padded(self.decisions.of_units()[:, lanes], len(units_VJ)))

    def tallies(self) -> list[Tally]:
        return [self._tally.settled()]

    @property
    def visits(self) -> int:
        self.resolve()
        return self.decisions.visits + (self._first_L is not None)

    def state_dict(self) -> dict[str, Any]:
        self.resolve()
        waiting = self._first_L is not None
        first_L = self._first_L if self._first_L is not None else np.ones(self._num_lanes, dtype=bool)
        return {
            "second": waiting,
            "first": torch.from_numpy(first_L.copy()),
            # Once a pair is decided, only the widths of its buckets are needed.
            "differences": {
                name: stored.rows_Lc[: self._num_lanes * waiting].clone() for name, stored in self.store.items()
            },
            "running_sum": {name: stored.running_sum_c.clone() for name, stored in self.store.items()},
            "decisions": self.decisions.state_dict(),
            "tally": asdict(self._tally.settled()),
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        self._pending, self._tables = None, []
        waiting = state.flag("second")
        first_L = state.tensor("first", self._num_lanes, dtype=torch.bool).cpu().numpy()
        self._first_L = first_L if waiting else None
        sums, rows = state.inside("running_sum"), state.inside("differences")
        if sums.values.keys() != rows.values.keys() or (dim and "row" not in sums.values):
            raise damaged(f"{state.name('running_sum')} and its differences are not those of the same rows")
        self.store = {}
        for name in sums.values:
            if not (
                name == "row" or all(type(number) is int for number in (name if isinstance(name, tuple) else [name]))
            ):
                raise state.refuse("running_sum", name, "names of buckets")
            # A bucket of a wrapped model has a width that is known only there.
            width = math.ceil(dim / dist.get_world_size(self._exchange.group)) if name == "row" else None
            types = (torch.float32, torch.float64)
            found = next((t for t in types if t == getattr(sums.raw(name), "dtype", None)), dtype)
            running_sum_c = sums.tensor(name, width, dtype=found)
            rows_Lc = rows.tensor(name, self._num_lanes * waiting, len(running_sum_c), dtype=found)
            empty_Lc = running_sum_c.new_zeros(self._num_lanes, len(running_sum_c))
            self.store[name] = StoredSlices(rows_Lc if waiting else empty_Lc, running_sum_c)
        self.decisions.load_state_dict(state.inside("decisions"))
        self._tally = Tally.loaded(state.inside("tally"))
        load_rule(self._rule, state.inside("rule"))


def whole_of(states: list[dict[str, Any]], dim: int) -> dict[str, Any] | None:
    """The state of a sorter with whole rows, from those of all ranks; None if rows came in buckets."""
    first = states[0]
    if any(name != "row" for name in first["running_sum"]):
        return None
    sums = [state["running_sum"]["row"] for state in states if state["running_sum"]]
    rows = [state["differences"]["row"] for state in states if state["running_sum"]]
    held_LD = torch.cat(rows, dim=1)[:, :dim] if first["second"] else torch.zeros(0, 0)
    balancer = {
        "running_sum": torch.cat([torch.zeros(0), *sums])[:dim],
        "tally": first["tally"],
        "witness": Witness().state_dict(),
        "rule": first["rule"],
    }
    return {
        "centring": {"held": held_LD, "counts": first["first"], "holding": first["second"]},
        "waiting": torch.zeros(0, len(first["first"]), 0),
        "decisions": first["decisions"],
        "balancers": [balancer],
    }


def slice_of(whole: dict[str, Any], dim: int, rank: int, size: int, *, held: bool = True) -> dict[str, Any]:
    """The state of `ShardedPairs` on a rank, from that of a sorter with whole rows; without `held` no pair is open."""
    centring, balancer = whole["centring"], whole["balancers"][0]
    waiting, num_lanes = centring["holding"] and held, len(centring["counts"])
    width = math.ceil(dim / size)

    def mine(rows: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(rows, (0, width * size - rows.shape[-1]))
        return filled[..., rank * width : (rank + 1) * width].clone()

    running_sum = balancer["running_sum"]
    return {
        "second": waiting,
        "first": centring["counts"] if waiting else torch.ones(num_lanes, dtype=torch.bool),
        "differences": {"row": mine(centring["held"]) if waiting else running_sum.new_zeros(0, width)} if dim else {},
        "running_sum": {"row": mine(running_sum)} if dim else {},
        "decisions": whole["decisions"],
        "tally": balancer["tally"],
        "rule": balancer["rule"],
    }

"""Rows of all lanes in, next order out: centring x rule x (one running sum or one per lane).

Short rows are buffered and balanced in blocks: signs are due only at the end of the epoch, and a block of short rows
costs hardly more than one row. Long rows are balanced as they come.

Shapes: `m` visits, `p` balancing rows of each lane, `L` lanes, `D` dimensions; `K` rows.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing.balancer import Balancer, Signs
from cdgrab.balancing.centring import CENTRINGS
from cdgrab.balancing.rules import Rule, RuleMaker
from cdgrab.balancing.tally import Tally
from cdgrab.fields import Fields
from cdgrab.lanes import BoolArray, IntArray
from cdgrab.orders import Balanced, Free, Herded, OrderSpec
from cdgrab.orders.decisions import Decisions
from cdgrab.orders.fill import from_lanes, next_order, padded
from cdgrab.orders.herding import greedy_herding

# The buffer holds about this many numbers (4 MiB of float32), or this many visits.
_BUFFER_NUMBERS = 1 << 20
_BUFFER_VISITS = 1024
# Rows of this length gain nothing in a block and are never buffered. On a CPU with numba, nor are shorter rows if this
# many numbers come in one call.
_LONG_ROW = 1 << 15
_ENOUGH = 1 << 16


class Sorter(Protocol):
    """Takes an epoch's rows and returns the next order."""

    @property
    def decisions(self) -> Decisions:
        """The signs so far."""

    @property
    def rules(self) -> list[Rule]:
        """The rules, one for each running sum."""

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:
        """Begin an epoch that will visit `visited_L` units of each lane."""

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        """Take the rows of the next visits. Nothing of `rows_mLD` is kept by reference.

        `counts_mL` says which of them are units, None: all. Lanes that miss one visit may have a unit in a later one.
        """

    def close(self) -> None:
        """Decide all signs: the epoch has no more rows."""

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        """The next order of some lanes, after `close`.

        Args:
            units_VJ: Their units: observed ones visit by visit, then the others; -1 where there is none.
            lanes: Selects these lanes.
        """

    def tallies(self) -> list[Tally]: ...

    @property
    def visits(self) -> int:
        """The number of visits whose rows have come."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        """Load a state into a fresh sorter, of rows of `dim` numbers; 0 if there has been none."""


class SignSorter:
    """Balances rows online. Memory grows with the number of units only by one sign each.

    Args:
        spec: The centring, and whether lanes share a running sum.
        rngs: A random generator for every lane whose rows come in.
        make_rule: Makes the rule of one running sum from a random generator.
        block: Rows to buffer before balancing; by default as many as fill about 4 MiB.
        watched: Numbers at the end of a row that are witnesses (`cdgrab.balancing.tally`).
    """

    def __init__(
        self,
        spec: Balanced,
        rngs: list[np.random.Generator],
        make_rule: RuleMaker,
        block: int | None = None,
        watched: int = 0,
    ) -> None:
        self._centring = CENTRINGS[spec.centring](len(rngs))
        self._balancers = [
            Balancer(make_rule(rng), watched=watched) for rng in (rngs[:1] if spec.coordinated else rngs)
        ]
        self._block = block
        self._buffer_VLD = torch.zeros(0, len(rngs), 0)
        self._num_buffered = 0
        self.decisions = self._new_decisions()

    @property
    def rules(self) -> list[Rule]:
        return [balancer.rule for balancer in self._balancers]

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:
        self._centring.start_epoch()
        self._num_buffered = 0
        self.decisions = self._new_decisions()
        rows_L = visited_L // self._centring.units_per_row
        per_sum = rows_L.tolist() if len(self._balancers) > 1 else [int(rows_L.sum())]
        for balancer, num_rows in zip(self._balancers, per_sum, strict=True):
            balancer.start_epoch(epoch, num_rows)

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        # Rounding must not depend on how many visits come in one call: whole visits always take the same path.
        whole = len(rows_mLD) if counts_mL is None else int(counts_mL.all(1).cumprod().sum())
        if whole:
            self._add_whole(rows_mLD[:whole])
        if counts_mL is not None and whole < len(rows_mLD):
            self._flush()
            self._balance(rows_mLD[whole:], counts_mL[whole:])

    def _add_whole(self, rows_mLD: Tensor) -> None:
        takes_as_is = rows_mLD.shape[-1] >= _LONG_ROW or (rows_mLD.numel() >= _ENOUGH and _uses_numba(rows_mLD))
        if takes_as_is and self._block is None:
            self._flush()
            self._balance(rows_mLD)
            return
        self._fit_buffer(rows_mLD)
        self._buffer(rows_mLD)

    def _buffer(self, rows_mLD: Tensor) -> None:
        """Buffer rows; balance them whenever the buffer is full."""
        start, visits, room = 0, len(rows_mLD), len(self._buffer_VLD)
        while start < visits:
            taken = min(visits - start, room - self._num_buffered)
            if taken == room:  # they fill the buffer by themselves: no need to copy them
                self._balance(rows_mLD[start : start + taken])
                start += taken
                continue
            self._buffer_VLD[self._num_buffered : self._num_buffered + taken] = rows_mLD[start : start + taken]
            self._num_buffered += taken
            start += taken
            if self._num_buffered == room:
                self._flush()

    def close(self) -> None:
        self._flush()

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        return next_order(units_VJ, padded(self.decisions.of_units()[:, lanes], len(units_VJ)))

    def tallies(self) -> list[Tally]:
        settled = [(balancer, balancer.tally.settled()) for balancer in self._balancers]
        return [balancer.witness.seen_by(tally) if balancer.watched else tally for balancer, tally in settled]

    def _new_decisions(self) -> Decisions:
        return Decisions(self._buffer_VLD.shape[1], paired=self._centring.units_per_row == 2)

    def _flush(self) -> None:
        """Balance the buffered rows."""
        buffered, self._num_buffered = self._num_buffered, 0
        if buffered:
            self._balance(self._buffer_VLD[:buffered])

    def _balance(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        for rows_pLD, minus_pLD, lanes_pL in self._centring.add(rows_mLD, counts_mL):
            if lanes_pL is not None:
                signs = self._balance_some(rows_pLD, minus_pLD, lanes_pL)
            elif len(self._balancers) == 1:
                signs = self._balancers[0].balance_visits(rows_pLD, minus_pLD)
            else:
                parts = [
                    torch.as_tensor(balancer.balance_visits(rows_pLD[:, lane, None], minus_pLD[:, lane, None]))
                    for lane, balancer in enumerate(self._balancers)
                ]
                signs = torch.stack(parts, dim=1).flatten()
            self.decisions.append(signs, lanes_pL)

    def _balance_some(self, rows_pLD: Tensor, minus_pLD: Tensor, lanes_pL: BoolArray) -> Signs:
        """The signs of rows that only some lanes have."""
        index = torch.from_numpy(np.flatnonzero(lanes_pL)).to(rows_pLD.device)
        rows_KD = rows_pLD.flatten(0, 1)[index] - minus_pLD.flatten(0, 1)[index]
        if len(self._balancers) == 1:
            return self._balancers[0].balance(rows_KD)
        lane_K = np.nonzero(lanes_pL)[1]
        signs_K = np.empty(len(lane_K), dtype=np.int8)
        for lane in np.unique(lane_K):
            mine_K = lane_K == lane
            rows = rows_KD[torch.from_numpy(np.flatnonzero(mine_K)).to(rows_KD.device)]
            signs_K[mine_K] = torch.as_tensor(self._balancers[lane].balance(rows)).cpu().numpy()
        return signs_K

    def visits_together(self, rows: Tensor) -> int:
        """The number of visits with rows like these that one block holds."""
        num_lanes, dim = self._buffer_VLD.shape[1], rows.shape[-1]
        if self._block is not None:
            return max(1, self._block // num_lanes)
        if dim >= _LONG_ROW:
            return 1
        return max(2, min(_BUFFER_VISITS, _BUFFER_NUMBERS // (num_lanes * dim)) // 2 * 2)

    def _fit_buffer(self, rows_mLD: Tensor) -> None:
        if self._buffer_VLD.shape[2] != rows_mLD.shape[2]:
            self._buffer_VLD = rows_mLD.new_zeros(self.visits_together(rows_mLD), *rows_mLD.shape[1:])

    @property
    def visits(self) -> int:
        return self.decisions.visits + self._centring.holds + self._num_buffered

    def state_dict(self) -> dict[str, Any]:
        return {
            "centring": self._centring.state_dict(),
            "waiting": self._buffer_VLD[: self._num_buffered, :, : None if self._num_buffered else 0].clone(),
            "decisions": self.decisions.state_dict(),
            "balancers": [balancer.state_dict() for balancer in self._balancers],
        }

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        self._centring.load_state_dict(state.inside("centring"), dim, dtype)
        waiting_VLD = state.tensor("waiting", None, self._buffer_VLD.shape[1], (0, dim), dtype=dtype)
        if len(waiting_VLD) and not waiting_VLD.numel():
            raise state.refuse("waiting", waiting_VLD, "rows with numbers")
        self.decisions.load_state_dict(state.inside("decisions"))
        for balancer, saved in zip(self._balancers, state.each("balancers", len(self._balancers)), strict=True):
            balancer.load_state_dict(saved, dim, dtype)
        self._fit_buffer(waiting_VLD)
        self._buffer(waiting_VLD)


class HerdingSorter:
    """Stores every row of the epoch and herds them greedily at its end: `O(units * dim)` memory."""

    def __init__(self, num_lanes: int) -> None:
        self.decisions = Decisions(num_lanes, paired=False)  # stays empty: greedy herding has no signs
        self._rows: list[list[Tensor]] = [[] for _ in range(num_lanes)]
        self._herded: list[IntArray] = []
        self.rules: list[Rule] = []

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:  # noqa: ARG002
        for rows in self._rows:
            rows.clear()

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        for lane, rows in enumerate(self._rows):
            mine_mD = rows_mLD[:, lane]
            if counts_mL is not None:
                mine_mD = mine_mD[torch.from_numpy(np.flatnonzero(counts_mL[:, lane])).to(mine_mD.device)]
            rows.extend(mine_mD.clone())

    def close(self) -> None:
        self._herded = greedy_herding([torch.stack(rows) if rows else torch.zeros(0, 0) for rows in self._rows])

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        found = []
        for units_V, herded in zip(units_VJ.T, self._herded[lanes], strict=True):
            mine = units_V[units_V >= 0]
            left_out = np.setdiff1d(np.arange(len(mine)), herded)  # units not visited, and rows that were not finite
            half = len(herded) // 2
            found.append(np.concatenate([mine[herded[:half]], mine[left_out], mine[herded[half:]]]))
        return from_lanes(found)

    def tallies(self) -> list[Tally]:
        rows = sum(len(rows) for rows in self._rows)
        nonfinite = rows - sum(len(herded) for herded in self._herded)
        return [Tally(rows=rows, nonfinite=nonfinite, sum_lengths=math.nan)]  # there is no running sum

    @property
    def visits(self) -> int:
        return max(map(len, self._rows))

    def state_dict(self) -> dict[str, Any]:
        rows = [row for lane in self._rows for row in lane]
        return {
            "lengths": torch.tensor([len(lane) for lane in self._rows]),
            "rows": torch.stack(rows) if rows else torch.zeros(0, 0),
        }

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        lengths = state.integers("lengths", len(self._rows), least=0, end=2**40).tolist()
        total = sum(lengths)
        rows = state.tensor("rows", total, dim if total else 0, dtype=dtype)
        self._rows = [list(lane) for lane in rows.split(lengths)]


def make_sorter(
    spec: OrderSpec,
    rngs: list[np.random.Generator],
    make_rule: RuleMaker,
    block: int | None = None,
    watched: int = 0,
) -> Sorter | None:
    """The sorter of an order, or None if it needs no gradients. The last `watched` numbers of a row are witnesses."""
    if isinstance(spec, Free):
        return None
    if isinstance(spec, Herded):
        return HerdingSorter(len(rngs))
    return SignSorter(spec, rngs, make_rule, block, watched)


def _uses_numba(rows: Tensor) -> bool:
    """Whether numba's loops balance these rows."""
    return rows.device.type == "cpu" and compiled.available()

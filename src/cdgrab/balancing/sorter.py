"""Rows of all lanes in, next order out: centring x rule x (one running sum or one per lane).

Short rows wait until there are many of them: signs are due only at the end of the epoch, and a block of short rows
costs hardly more than one. Long rows are balanced as they come.

Shapes: `m` visits, `p` balancing rows of each lane, `L` lanes, `D` dimensions; `K` rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing.balancer import Balancer, Signs
from cdgrab.balancing.centring import CENTRINGS
from cdgrab.balancing.rules import Rule, RuleMaker
from cdgrab.balancing.tally import Tally, Witness
from cdgrab.lanes import BoolArray, IntArray
from cdgrab.orders import Balanced, Free, Herded, OrderSpec
from cdgrab.orders.decisions import Decisions
from cdgrab.orders.fill import from_lanes, next_order, padded
from cdgrab.orders.herding import greedy_herding

# Rows wait until they fill about this many numbers (4 MiB of float32) or this many visits.
_WAITING_NUMBERS = 1 << 20
_WAITING_VISITS = 1024
# Rows of this length gain nothing by waiting, and are never stored. Nor are shorter ones, on a CPU with numba, if this
# many numbers come together.
_LONG_ROW = 1 << 15
_ENOUGH = 1 << 16


class Sorter(Protocol):
    """Collects an epoch's rows and arranges the next one."""

    @property
    def decisions(self) -> Decisions:
        """The signs so far."""

    @property
    def rules(self) -> list[Rule]:
        """The rules, one for each running sum."""

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:
        """Begin; `visited_L` says how many units of each lane are going to be visited."""

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        """Take the rows of the next visits. Nothing of `rows_mLD` is kept by reference.

        `counts_mL` says which of them are units, None: all. Lanes that miss one visit may have a unit in a later one.
        """

    def close(self) -> None:
        """No more rows this epoch."""

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        """The next order of some lanes, after `close`.

        Args:
            units_VJ: Their units, visit by visit as they were observed, then the others; -1 where there is none.
            lanes: Which of the lanes these are.
        """

    def tallies(self) -> list[Tally]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SignSorter:
    """Balances rows online; memory does not grow with the number of units but for one sign each.

    Args:
        spec: What is balanced and with whom.
        rngs: A random generator for every lane whose rows come in.
        make_rule: Makes the rule of one running sum from a random generator.
        block: Rows to collect before balancing; by default as many as fill about 4 MiB.
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
        self._waiting_VLD = torch.zeros(0, len(rngs), 0)
        self._num_waiting = 0
        self.decisions = self._new_decisions()

    @property
    def rules(self) -> list[Rule]:
        return [balancer.rule for balancer in self._balancers]

    def start_epoch(self, epoch: int, visited_L: IntArray) -> None:
        self._centring.start_epoch()
        self._num_waiting = 0
        self.decisions = self._new_decisions()
        rows_L = visited_L // self._centring.units_per_row
        per_sum = rows_L.tolist() if len(self._balancers) > 1 else [int(rows_L.sum())]
        for balancer, num_rows in zip(self._balancers, per_sum, strict=True):
            balancer.start_epoch(epoch, num_rows)

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        # What is rounded how must not depend on how many visits come together: whole ones go their usual way.
        whole = len(rows_mLD) if counts_mL is None else int(counts_mL.all(1).cumprod().sum())
        if whole:
            self._add_whole(rows_mLD[:whole])
        if counts_mL is not None and whole < len(rows_mLD):
            self._flush()
            self._balance(rows_mLD[whole:], counts_mL[whole:])

    def _add_whole(self, rows_mLD: Tensor) -> None:
        enough = rows_mLD.shape[-1] >= _LONG_ROW or (rows_mLD.numel() >= _ENOUGH and _compiled(rows_mLD))
        if enough and self._block is None:
            self._flush()
            self._balance(rows_mLD)
            return
        self._make_room(rows_mLD)
        start, visits, room = 0, len(rows_mLD), len(self._waiting_VLD)
        while start < visits:
            taken = min(visits - start, room - self._num_waiting)
            if taken == room:  # as many as would be waited for: no need to store them
                self._balance(rows_mLD[start : start + taken])
                start += taken
                continue
            self._waiting_VLD[self._num_waiting : self._num_waiting + taken] = rows_mLD[start : start + taken]
            self._num_waiting += taken
            start += taken
            if self._num_waiting == room:
                self._flush()

    def close(self) -> None:
        self._flush()

    def arrange(self, units_VJ: IntArray, lanes: slice) -> IntArray:
        return next_order(units_VJ, padded(self.decisions.of_units()[:, lanes], len(units_VJ)))

    def tallies(self) -> list[Tally]:
        settled = [(balancer, balancer.tally.settled()) for balancer in self._balancers]
        return [balancer.witness.seen_by(tally) if balancer.watched else tally for balancer, tally in settled]

    def _new_decisions(self) -> Decisions:
        return Decisions(self._waiting_VLD.shape[1], paired=self._centring.units_per_row == 2)

    def _flush(self) -> None:
        """Balance the rows that wait."""
        waiting, self._num_waiting = self._num_waiting, 0
        if waiting:
            self._balance(self._waiting_VLD[:waiting])

    def _balance(self, rows_mLD: Tensor, counts_mL: BoolArray | None = None) -> None:
        for rows_pLD, minus_pLD, lanes_pL in self._centring.add(rows_mLD, counts_mL):
            if lanes_pL is not None:
                signs = self._of_some(rows_pLD, minus_pLD, lanes_pL)
            elif len(self._balancers) == 1:
                signs = self._balancers[0].balance_visits(rows_pLD, minus_pLD)
            else:
                parts = [
                    torch.as_tensor(balancer.balance_visits(rows_pLD[:, lane, None], minus_pLD[:, lane, None]))
                    for lane, balancer in enumerate(self._balancers)
                ]
                signs = torch.stack(parts, dim=1).flatten()
            self.decisions.append(signs, lanes_pL)

    def _of_some(self, rows_pLD: Tensor, minus_pLD: Tensor, lanes_pL: BoolArray) -> Signs:
        """Signs of rows that not all lanes have, each with its own lane's running sum or all with the one."""
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
        """How many visits with rows like these are balanced together, if they come one by one."""
        num_lanes, dim = self._waiting_VLD.shape[1], rows.shape[-1]
        if self._block is not None:
            return max(1, self._block // num_lanes)
        if dim >= _LONG_ROW:
            return 1
        return max(2, min(_WAITING_VISITS, _WAITING_NUMBERS // (num_lanes * dim)) // 2 * 2)

    def _make_room(self, rows_mLD: Tensor) -> None:
        if self._waiting_VLD.shape[2] != rows_mLD.shape[2]:
            self._waiting_VLD = rows_mLD.new_zeros(self.visits_together(rows_mLD), *rows_mLD.shape[1:])

    def state_dict(self) -> dict[str, Any]:
        return {
            "centring": self._centring.state_dict(),
            "room": len(self._waiting_VLD),
            "waiting": self._waiting_VLD[: self._num_waiting].clone(),
            "decisions": self.decisions.state_dict(),
            "running_sums": [balancer.running_sum.clone() for balancer in self._balancers],
            "tallies": [asdict(balancer.tally.settled()) for balancer in self._balancers],
            "witnesses": [balancer.witness.state_dict() for balancer in self._balancers],
            "rules": [balancer.rule.state_dict() for balancer in self._balancers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._centring.load_state_dict(state["centring"])
        waiting = state["waiting"]
        self._num_waiting = waiting.shape[0]
        self._waiting_VLD = waiting.new_zeros(state["room"], *waiting.shape[1:])
        self._waiting_VLD[: self._num_waiting] = waiting
        self.decisions.load_state_dict(state["decisions"])
        for i, balancer in enumerate(self._balancers):
            balancer.running_sum = state["running_sums"][i].clone()
            balancer.tally = Tally(**state["tallies"][i])
            balancer.witness = Witness(**state["witnesses"][i])
            balancer.rule.load_state_dict(state["rules"][i])


class HerdingSorter:
    """Keeps every row of the epoch and herds them greedily at its end: `O(units * dim)` memory."""

    def __init__(self, num_lanes: int) -> None:
        self.decisions = Decisions(num_lanes, paired=False)  # stays empty: greedy herding knows no signs
        self._rows: list[list[Tensor]] = [[] for _ in range(num_lanes)]
        self._herded: list[IntArray] = []
        self.rules: list[Rule] = []  # nothing is drawn

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
            left_out = np.setdiff1d(np.arange(len(mine)), herded)  # rows that were not finite, units not visited
            half = len(herded) // 2
            found.append(np.concatenate([mine[herded[:half]], mine[left_out], mine[herded[half:]]]))
        return from_lanes(found)

    def tallies(self) -> list[Tally]:
        rows = sum(len(rows) for rows in self._rows)
        nonfinite = rows - sum(len(herded) for herded in self._herded)
        return [Tally(rows=rows, nonfinite=nonfinite, sum_lengths=math.nan)]  # there is no running sum

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [torch.stack(rows).clone() if rows else torch.zeros(0, 0) for rows in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = [list(rows.clone()) for rows in state["rows"]]


def make_sorter(
    spec: OrderSpec,
    rngs: list[np.random.Generator],
    make_rule: RuleMaker,
    block: int | None = None,
    watched: int = 0,
) -> Sorter | None:
    """The sorter of an order, None if it needs no gradients; the last `watched` numbers of a row are witnesses."""
    if isinstance(spec, Free):
        return None
    if isinstance(spec, Herded):
        return HerdingSorter(len(rngs))
    return SignSorter(spec, rngs, make_rule, block, watched)


def _compiled(rows: Tensor) -> bool:
    """Whether numba's loops are what balances these rows."""
    return rows.device.type == "cpu" and compiled.available()

"""Rows of all workers in, next order out: centring x rule x (one running sum or one per worker).

Short rows wait until there are many of them: signs are due only at the end of the epoch, and a block of short rows
costs hardly more than one. Long rows are balanced as they come.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing.balancer import Balancer, Signs
from cdgrab.balancing.centring import CENTRINGS
from cdgrab.balancing.recorded import LONG_ROW, RecordedBlocks
from cdgrab.balancing.rules import Rule, RuleMaker
from cdgrab.balancing.tally import Tally, Witness
from cdgrab.lanes import IntArray
from cdgrab.orders import Balanced, Herded
from cdgrab.orders.decisions import Decisions
from cdgrab.orders.herding import greedy_herding

# Rows wait until they fill about this many numbers (4 MiB of float32) or this many turns.
_WAITING_NUMBERS = 1 << 20
_WAITING_TURNS = 1024
# Long rows gain nothing by waiting, and are never stored. Nor do shorter ones, on a CPU with numba, if this many
# numbers come together.
_ENOUGH = 1 << 16


class Sorter(Protocol):
    """Collects an epoch's rows and arranges the next one."""

    @property
    def decisions(self) -> Decisions:
        """The signs so far."""

    @property
    def rules(self) -> list[Rule]:
        """The rules, one for each running sum."""

    def start_epoch(self, epoch: int, visits: IntArray) -> None:
        """Begin; `visits` says how many units each worker is going to visit."""

    def close(self) -> None:
        """No more rows this epoch."""

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        """The next order of a worker, after `close`."""

    def tallies(self) -> list[Tally]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RowSorter(Sorter, Protocol):
    """A sorter that takes whole rows."""

    def add(self, rows_bWD: Tensor) -> None:
        """Take the next `b` rows of every worker, turn by turn. Nothing of `rows_bWD` is kept by reference."""

    def add_one(self, row_D: Tensor, worker: int) -> None:
        """Take the next row of one worker."""


class SignSorter:
    """Balances rows online; memory does not grow with the number of units but for one sign each.

    Args:
        spec: What is balanced and with whom.
        rngs: A random generator for every worker whose rows come in.
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
        self._workers = self._tiled = np.arange(len(rngs))
        self._centring = CENTRINGS[spec.centring](len(rngs))
        self._balancers = [
            Balancer(make_rule(rng), watched=watched) for rng in (rngs[:1] if spec.coordinated else rngs)
        ]
        if len(self._balancers) == 1:
            self._balancers[0].blocks = RecordedBlocks()
        self._block = block
        self._waiting_TWD = torch.zeros(0, len(rngs), 0)
        self._num_waiting = 0
        self.decisions = Decisions()

    @property
    def rules(self) -> list[Rule]:
        return [balancer.rule for balancer in self._balancers]

    def start_epoch(self, epoch: int, visits: IntArray) -> None:
        self._centring.start_epoch()
        self._num_waiting = 0
        self.decisions = Decisions()
        rows_W = visits // self._centring.units_per_row
        per_chain = rows_W.tolist() if len(self._balancers) > 1 else [int(rows_W.sum())]
        for balancer, num_rows in zip(self._balancers, per_chain, strict=True):
            balancer.start_epoch(epoch, num_rows)

    def add(self, rows_bWD: Tensor) -> None:
        """Turns may have two dimensions, `S x t x W x D`: those of several steps, which are joined only if need be."""
        enough = rows_bWD.shape[-1] >= LONG_ROW or (rows_bWD.numel() >= _ENOUGH and _compiled(rows_bWD))
        directly = enough and self._block is None and self._centring.in_step
        if rows_bWD.ndim == 4 and not (directly and _compiled(rows_bWD)):
            rows_bWD = rows_bWD.flatten(0, 1)
        if not self._centring.in_step:
            for rows_WD in rows_bWD:
                for worker, row_D in enumerate(rows_WD):
                    self.add_one(row_D, worker)
            return
        if directly:
            self._flush()
            for rows, minus in self._centring.add(rows_bWD):
                self._decide_turns(rows, minus)
            return
        self._make_room(rows_bWD)
        start, turns, room = 0, rows_bWD.shape[0], self._waiting_TWD.shape[0]
        while start < turns:
            taken = min(turns - start, room - self._num_waiting)
            if taken == room:  # as many as would be waited for: no need to store them
                self._balance(rows_bWD[start : start + taken])
                start += taken
                continue
            self._waiting_TWD[self._num_waiting : self._num_waiting + taken] = rows_bWD[start : start + taken]
            self._num_waiting += taken
            start += taken
            if self._num_waiting == room:
                self._flush()

    def add_one(self, row_D: Tensor, worker: int) -> None:
        self._flush()
        for rows, minus in self._centring.add_one(row_D, worker):
            self._decide(rows[0] - minus[0], np.array([worker]))

    def close(self) -> None:
        self._flush()

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        return self.decisions.arrange(worker, visited_N, unvisited_M)

    def tallies(self) -> list[Tally]:
        settled = [(balancer, balancer.tally.settled()) for balancer in self._balancers]
        return [balancer.witness.seen_by(tally) if balancer.watched else tally for balancer, tally in settled]

    def _flush(self) -> None:
        """Balance the rows that wait."""
        waiting, self._num_waiting = self._num_waiting, 0
        if waiting:
            self._balance(self._waiting_TWD[:waiting])

    def _balance(self, rows_bWD: Tensor) -> None:
        for rows, minus in self._centring.add(rows_bWD):
            if rows.is_cuda or _compiled(rows):
                self._decide_turns(rows, minus)
                continue
            self._decide((rows - minus).flatten(0, 1), self._workers_of(rows.shape[0]))

    def _decide_turns(self, rows_mWD: Tensor, minus_mWD: Tensor) -> None:
        """As `_decide`, for whole turns; rows stay where they are, and on a GPU nobody waits for signs.

        With numba, what is rounded how does not depend on how many turns come together, nor on whether they waited.
        """
        if len(self._balancers) == 1:
            signs: Signs = self._balancers[0].balance_turns(rows_mWD, minus_mWD)
        else:
            alone = [
                torch.as_tensor(balancer.balance_turns(rows_mWD[..., worker, None, :], minus_mWD[..., worker, None, :]))
                for worker, balancer in enumerate(self._balancers)
            ]
            signs = torch.stack(alone, dim=1).flatten()
        self._append(self._workers_of(rows_mWD.shape[:-2].numel()), signs)

    def _decide(self, rows_ND: Tensor, workers_N: IntArray) -> None:
        """Balance rows, each with its own worker's running sum or all with the one."""
        if len(self._balancers) == 1:
            signs_N: Signs = self._balancers[0].balance(rows_ND)
        else:
            signs_N = np.empty(len(workers_N), dtype=np.int8)
            for worker in np.unique(workers_N):
                mine_N = workers_N == worker
                index = torch.from_numpy(mine_N).to(rows_ND.device)
                signs_N[mine_N] = torch.as_tensor(self._balancers[worker].balance(rows_ND[index])).cpu().numpy()
        self._append(workers_N, signs_N)

    def _append(self, workers_N: IntArray, signs_N: Signs) -> None:
        if self._centring.units_per_row == 2:
            self.decisions.append_pairs(workers_N, signs_N)
        else:
            self.decisions.append(workers_N, signs_N)

    def _workers_of(self, turns: int) -> IntArray:
        """The workers of the rows of so many turns; kept, since it is mostly the same number."""
        if len(self._tiled) != turns * len(self._workers):
            self._tiled = np.tile(self._workers, turns)
        return self._tiled

    def turns_together(self, rows: Tensor) -> int:
        """How many turns of rows like these are balanced together, if they come one by one."""
        num_workers, dim = len(self._workers), rows.shape[-1]
        if self._block is not None:
            return max(1, self._block // num_workers)
        if dim >= LONG_ROW:
            return 1
        return max(2, min(_WAITING_TURNS, _WAITING_NUMBERS // (num_workers * dim)) // 2 * 2)

    def _make_room(self, rows_bWD: Tensor) -> None:
        _, num_workers, dim = rows_bWD.shape
        if self._waiting_TWD.shape[2] != dim:
            self._waiting_TWD = rows_bWD.new_zeros(self.turns_together(rows_bWD), num_workers, dim)

    def state_dict(self) -> dict[str, Any]:
        return {
            "centring": self._centring.state_dict(),
            "room": self._waiting_TWD.shape[0],
            "waiting": self._waiting_TWD[: self._num_waiting].clone(),
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
        self._waiting_TWD = waiting.new_zeros(state["room"], *waiting.shape[1:])
        self._waiting_TWD[: self._num_waiting] = waiting
        self.decisions.load_state_dict(state["decisions"])
        for i, balancer in enumerate(self._balancers):
            balancer.running_sum = state["running_sums"][i].clone()
            balancer.tally = Tally(**state["tallies"][i])
            balancer.witness = Witness(**state["witnesses"][i])
            balancer.rule.load_state_dict(state["rules"][i])


class HerdingSorter:
    """Keeps every row of the epoch and herds them greedily at its end: `O(units * dim)` memory."""

    def __init__(self, num_workers: int) -> None:
        self.decisions = Decisions()  # stays empty: greedy herding knows no signs
        self._rows: list[list[Tensor]] = [[] for _ in range(num_workers)]
        self._herded: list[IntArray] = []
        self.rules: list[Rule] = []  # nothing is drawn

    def start_epoch(self, epoch: int, visits: IntArray) -> None:  # noqa: ARG002
        for rows in self._rows:
            rows.clear()

    def add(self, rows_bWD: Tensor) -> None:
        for worker, rows in enumerate(self._rows):
            rows.extend(rows_bWD[:, worker].clone())

    def add_one(self, row_D: Tensor, worker: int) -> None:
        self._rows[worker].append(row_D.clone())

    def close(self) -> None:
        self._herded = greedy_herding([torch.stack(rows) if rows else torch.zeros(0, 0) for rows in self._rows])

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        herded = self._herded[worker]
        left_out = np.setdiff1d(np.arange(len(visited_N)), herded)  # rows that were not finite
        half = len(herded) // 2
        front, back = visited_N[herded[:half]], visited_N[herded[half:]]
        return np.concatenate([front, visited_N[left_out], unvisited_M, back])

    def tallies(self) -> list[Tally]:
        rows = sum(len(rows) for rows in self._rows)
        return [Tally(rows=rows, nonfinite=rows - sum(len(herded) for herded in self._herded))]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [torch.stack(rows).clone() if rows else torch.zeros(0, 0) for rows in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = [list(rows.clone()) for rows in state["rows"]]


def make_sorter(
    spec: Balanced | Herded,
    rngs: list[np.random.Generator],
    make_rule: RuleMaker,
    block: int | None = None,
    watched: int = 0,
) -> RowSorter:
    """The sorter of an order that needs gradients; the last `watched` numbers of a row are witnesses."""
    if isinstance(spec, Herded):
        return HerdingSorter(len(rngs))
    return SignSorter(spec, rngs, make_rule, block, watched)


def _compiled(rows: Tensor) -> bool:
    """Whether numba's loops are what balances these rows."""
    return rows.device.type == "cpu" and compiled.available()

"""Rows of all workers in, next order out: centring x rule x (one running sum or one per worker).

Rows are buffered into blocks, because signs are due only at the end of the epoch and a block of small rows costs
hardly more than one of them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cdgrab.balance.blocked import Balancer, Tally
from cdgrab.balance.rules import RuleMaker
from cdgrab.grads.centring import CENTRINGS
from cdgrab.order import Balanced, Herded
from cdgrab.order.fill import SignArray, next_order
from cdgrab.order.herding import greedy_herding
from cdgrab.units import IntArray

# Rows are collected until they fill about this many numbers (4 MiB of float32), and at most this many rows for each
# running sum. A step of all workers is always taken whole.
_BLOCK_NUMBERS = 1 << 20
_BLOCK_ROWS = 1024


class Sorter(Protocol):
    """Collects an epoch's rows and arranges the next one."""

    def start_epoch(self, epoch: int, visits: IntArray) -> None:
        """Begin; `visits` says how many units each worker is going to visit."""

    def add(self, rows_bWD: Tensor) -> None:
        """Take the next `b` rows of every worker, turn by turn. Nothing of `rows_bWD` is kept by reference."""

    def add_one(self, row_D: Tensor, worker: int) -> None:
        """Take the next row of one worker."""

    def close(self) -> None:
        """No more rows this epoch."""

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        """The next order of a worker, after `close`."""

    def tallies(self) -> list[Tally]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SignSorter:
    """Balances rows online; memory does not grow with the number of units but for one sign each.

    Args:
        spec: What is balanced and with whom.
        rngs: A random generator for every worker whose rows come in.
        make_rule: Makes the rule of one running sum from a random generator.
        block: Rows to collect before balancing; by default as many as fill about 4 MiB.
    """

    def __init__(
        self,
        spec: Balanced,
        rngs: list[np.random.Generator],
        make_rule: RuleMaker,
        block: int | None = None,
    ) -> None:
        self._coordinated = spec.coordinated
        self._num_workers = len(rngs)
        self._centring = CENTRINGS[spec.centring](len(rngs))
        self._balancers = [Balancer(make_rule(rng)) for rng in (rngs[:1] if spec.coordinated else rngs)]
        self._block = block
        self._rows_BD = torch.zeros(0, 0)
        self._workers_B = np.zeros(0, dtype=np.int64)
        self._filled = 0
        self._turn_labels = np.zeros(0, dtype=np.int64)
        self._decided: list[tuple[IntArray, SignArray]] = []  # (workers, signs) of the blocks of this epoch

    def start_epoch(self, epoch: int, visits: IntArray) -> None:
        self._centring.start_epoch()
        self._filled = 0
        self._decided = []
        rows_W = visits // self._centring.units_per_row
        per_chain = [int(rows_W.sum())] if self._coordinated else rows_W.tolist()
        for balancer, num_rows in zip(self._balancers, per_chain, strict=True):
            balancer.start_epoch(epoch, num_rows)

    def add(self, rows_bWD: Tensor) -> None:
        self._centring.add(rows_bWD, self._emit)

    def add_one(self, row_D: Tensor, worker: int) -> None:
        self._centring.add_one(row_D, worker, self._emit)

    def close(self) -> None:
        self._flush()

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        signs = np.zeros(len(visited_N) + len(unvisited_M), dtype=np.int8)
        mine = [signs_B[workers_B == worker] for workers_B, signs_B in self._decided]
        if mine:
            decided = self._centring.unit_signs(np.concatenate(mine))
            signs[: len(decided)] = decided
        return next_order(np.concatenate([visited_N, unvisited_M]), signs)

    def tallies(self) -> list[Tally]:
        return [balancer.tally for balancer in self._balancers]

    def _emit(self, rows: Tensor, minus: Tensor, *, worker: int | None = None) -> None:
        """Add `rows - minus` to the block: `m x W x D` of all workers, or `1 x 1 x D` of one."""
        workers = self._labels(rows.shape[0]) if worker is None else np.array([worker])
        self._make_room(rows)
        filled = self._filled + len(workers)
        if filled <= len(self._workers_B):
            # The usual case: straight into the block, one pass over the rows.
            torch.sub(rows, minus, out=self._rows_BD[self._filled : filled].view(rows.shape))
            self._workers_B[self._filled : filled] = workers
            self._filled = filled
            if filled == len(self._workers_B):
                self._flush()
            return
        differences_ND = (rows - minus).reshape(len(workers), -1)
        start = 0
        while start < len(workers):
            take = min(len(workers) - start, len(self._workers_B) - self._filled)
            self._rows_BD[self._filled : self._filled + take] = differences_ND[start : start + take]
            self._workers_B[self._filled : self._filled + take] = workers[start : start + take]
            self._filled += take
            start += take
            if self._filled == len(self._workers_B):
                self._flush()

    def _flush(self) -> None:
        if self._filled == 0:
            return
        rows_BD, workers_B = self._rows_BD[: self._filled], self._workers_B[: self._filled].copy()
        if self._coordinated or self._num_workers == 1:
            signs_B = self._balancers[0].balance(rows_BD)
        else:
            signs_B = np.empty(len(workers_B), dtype=np.int8)
            for worker in np.unique(workers_B):
                mine_B = workers_B == worker
                signs_B[mine_B] = self._balancers[worker].balance(rows_BD[torch.from_numpy(mine_B)])
        self._decided.append((workers_B, signs_B))
        self._filled = 0

    def _labels(self, turns: int) -> IntArray:
        """Which worker each row of `turns` whole turns comes from."""
        if len(self._turn_labels) != turns * self._num_workers:
            self._turn_labels = np.tile(np.arange(self._num_workers), turns)
        return self._turn_labels

    def _make_room(self, rows: Tensor) -> None:
        dim = rows.shape[-1]
        if self._rows_BD.shape[1] != dim:
            most = min(_BLOCK_ROWS * len(self._balancers), _BLOCK_NUMBERS // dim)
            size = self._block or self._num_workers * max(1, most // self._num_workers)
            self._rows_BD = rows.new_zeros(size, dim)
            self._workers_B = np.zeros(size, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "centring": self._centring.state_dict(),
            "block_size": len(self._rows_BD),
            "rows": self._rows_BD[: self._filled].clone(),
            "workers": torch.from_numpy(self._workers_B[: self._filled].copy()),
            "decided_workers": _joined([workers for workers, _ in self._decided], torch.int64),
            "decided_signs": _joined([signs for _, signs in self._decided], torch.int8),
            "running_sums": [balancer.running_sum.clone() for balancer in self._balancers],
            "tallies": [asdict(balancer.tally) for balancer in self._balancers],
            "rules": [balancer.rule.state_dict() for balancer in self._balancers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._centring.load_state_dict(state["centring"])
        rows = state["rows"]
        self._filled = len(rows)
        self._rows_BD = rows.new_zeros(state["block_size"], rows.shape[1])
        self._rows_BD[: self._filled] = rows
        self._workers_B = np.zeros(state["block_size"], dtype=np.int64)
        self._workers_B[: self._filled] = state["workers"].numpy()
        workers, signs = state["decided_workers"].numpy().copy(), state["decided_signs"].numpy().copy()
        self._decided = [(workers, signs)] if len(workers) else []
        for i, balancer in enumerate(self._balancers):
            balancer.running_sum = state["running_sums"][i].clone()
            balancer.tally = Tally(**state["tallies"][i])
            balancer.rule.load_state_dict(state["rules"][i])


class HerdingSorter:
    """Keeps every row of the epoch and herds them greedily at its end: `O(units * dim)` memory."""

    def __init__(self, num_workers: int) -> None:
        self._rows: list[list[Tensor]] = [[] for _ in range(num_workers)]
        self._herded: list[IntArray] = []

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
    spec: Balanced | Herded, rngs: list[np.random.Generator], make_rule: RuleMaker, block: int | None = None
) -> Sorter:
    """The sorter of an order that needs gradients."""
    if isinstance(spec, Herded):
        return HerdingSorter(len(rngs))
    return SignSorter(spec, rngs, make_rule, block)


def _joined(parts: list[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, dtype=dtype)

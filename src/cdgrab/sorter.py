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
# Rows this long gain nothing by waiting for others: they are balanced as they come, and never stored.
_LONG_ROW = 1 << 15


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
        self._everyone = np.arange(len(rngs))
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
        if self._block is None and rows.shape[-1] >= _LONG_ROW:
            workers = self._everyone if worker is None else np.array([worker])
            for turn in range(rows.shape[0]):
                self._decide(rows[turn], minus[turn], workers)
            return
        self._make_room(rows)
        start = 0
        while start < rows.shape[0]:
            # As many whole turns as fit go straight into the block, in one pass over the rows.
            workers = self._everyone if worker is None else np.array([worker])
            turns = min(rows.shape[0] - start, (len(self._workers_B) - self._filled) // len(workers))
            if turns == 0:
                self._emit_by_row(rows[start] - minus[start], workers)
                start += 1
                continue
            end = self._filled + turns * len(workers)
            out = self._rows_BD[self._filled : end].view(turns, len(workers), -1)
            torch.sub(rows[start : start + turns], minus[start : start + turns], out=out)
            self._workers_B[self._filled : end] = np.tile(workers, turns) if turns > 1 else workers
            self._filled = end
            start += turns
            if end == len(self._workers_B):
                self._flush()

    def _emit_by_row(self, differences_ND: Tensor, workers_N: IntArray) -> None:
        """A turn that does not fit into what is left of the block."""
        for row_D, worker in zip(differences_ND, workers_N, strict=True):
            self._rows_BD[self._filled] = row_D
            self._workers_B[self._filled] = worker
            self._filled += 1
            if self._filled == len(self._workers_B):
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            self._decide(self._rows_BD[: self._filled], None, self._workers_B[: self._filled].copy())
            self._filled = 0

    def _decide(self, rows_ND: Tensor, minus_ND: Tensor | None, workers_N: IntArray) -> None:
        """Balance the rows `rows - minus`, each with its own worker's running sum or all with the one."""
        if len(self._balancers) == 1:
            signs_N = self._balancers[0].balance(rows_ND, minus_ND)
        else:
            signs_N = np.empty(len(workers_N), dtype=np.int8)
            for worker in np.unique(workers_N):
                mine_N = workers_N == worker
                index = torch.from_numpy(mine_N).to(rows_ND.device)
                minus = None if minus_ND is None else minus_ND[index]
                signs_N[mine_N] = self._balancers[worker].balance(rows_ND[index], minus)
        self._decided.append((workers_N, signs_N))

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

"""How far an epoch has got: which units have been observed, and what is left to visit.

Rows come either in the planned order, when a count says it all, or with their examples named, when they may come
in any order. Both are checked here, before anything is recorded.

Shapes: `L` local workers, `m` turns of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cdgrab.lanes import IntArray, Units


@dataclass(frozen=True)
class Step:
    """Rows that passed the checks.

    Attributes:
        turns: Rows of each local worker.
        counts_Lm: Which rows are units to be balanced; the others belong to the rest or are padding. None: all.
        units: If rows are named, the units of every local worker in the order of its rows.
    """

    turns: int
    counts_Lm: npt.NDArray[np.bool_] | None = None
    units: list[list[int]] | None = None


class Progress:
    """The state of one epoch."""

    def __init__(self, units: Units, epoch: int, orders: list[IntArray]) -> None:
        self._units = units
        self._orders = orders
        self._padding = units.padding(epoch)
        self._locals = list(units.world.local_workers)
        self._visits_L = units.visits(units.world.local_workers)
        self._fewest_visits = int(self._visits_L.min())
        self._turns = 0
        self._named = False
        self._visited: list[list[int]] = [[] for _ in self._locals]  # only when rows are named
        self._seen = [np.zeros(len(order), dtype=bool) for order in orders]  # likewise

    @property
    def turns(self) -> int:
        """Rows observed of each worker."""
        return self._turns

    @property
    def finished(self) -> bool:
        """Whether every row of the epoch has been observed."""
        return self._turns == self._units.num_slots

    @property
    def samples_left(self) -> int:
        """Examples each worker has yet to visit."""
        return (
            len(self._left(0)) if self._named else max(0, self._units.num_samples - self._turns * self._units.unit_size)
        )

    def visited(self, local: int) -> IntArray:
        """Units of a local worker in the order in which they were observed."""
        if self._named:
            return np.array(self._visited[local], dtype=np.int64)
        return self._orders[local][: min(self._turns, self._visits_L[local])]

    def unvisited(self, local: int) -> IntArray:
        """Its other units, in planned order."""
        order = self._orders[local]
        seen = np.zeros(len(order), dtype=bool)
        seen[self.visited(local)] = True
        return order[~seen[order]]

    def next_step(self, num_rows: int | None, turns_per_batch: int) -> Step:
        """Check the rows of a batch that comes in planned order; None counts the batch, whatever it gave."""
        self._check_mode(named=False)
        workers, left = len(self._locals), self._units.num_slots - self._turns
        turns = min(turns_per_batch, left)
        if num_rows is not None and num_rows != workers * turns:
            each = f", {turns} from each of {workers} simulated workers" if workers > 1 else ""
            raise ValueError(
                f"{num_rows} rows for a batch of {workers * turns} units{each}; give one row for every unit of "
                f"{self._units.unit_size} examples, or make the ordering with another unit_size (1: a row per example)"
            )
        if self._turns + turns <= self._fewest_visits:
            return Step(turns)
        turns_m = np.arange(self._turns, self._turns + turns)
        return Step(turns, turns_m < self._visits_L[:, None])

    def named_step(self, num_rows: int, examples: IntArray) -> Step:
        """Check rows whose examples are named, `unit_size` per row; a worker's last row may have fewer."""
        self._check_mode(named=True)
        workers, size = len(self._locals), self._units.unit_size
        if len(examples) and examples.dtype.kind not in "iu":
            raise ValueError(f"units are dataset indices, whole numbers; found {examples.dtype}")
        if len(examples) == 0 or len(examples) % workers:
            raise ValueError(f"{len(examples)} examples are named, which {workers} workers cannot share evenly")
        turns = -(-len(examples) // (workers * size))
        if num_rows != workers * turns:
            raise ValueError(
                f"{num_rows} rows, but {len(examples)} named examples make {workers * turns} units of {size}"
            )
        if self._turns + turns > self._units.num_slots:
            left = self._units.num_slots - self._turns
            raise ValueError(f"{num_rows} rows, but the epoch has {left * workers} units left")
        counts_Lm = np.zeros((workers, turns), dtype=bool)
        units: list[list[int]] = [[] for _ in self._locals]
        for local, mine in enumerate(examples.reshape(workers, -1)):
            for turn in range(turns):
                now = units[local]
                unit = self._find(local, mine[turn * size : (turn + 1) * size], now, turn - len(now))
                if unit is not None:
                    counts_Lm[local, turn] = True
                    units[local].append(unit)
        return Step(turns, counts_Lm, units)

    def record(self, step: Step) -> None:
        """Count the rows of a checked step."""
        self._named = step.units is not None
        self._turns += step.turns
        for visited, seen, units in zip(self._visited, self._seen, step.units or [], strict=False):
            visited.extend(units)
            seen[units] = True

    def stream(self, worker_batch: int) -> IntArray:
        """Examples left to visit, as a loader of `L * worker_batch` per batch must get them: worker by worker."""
        columns = np.stack([self._left(local) for local in range(len(self._locals))])  # (L, left)
        left = columns.shape[1]
        whole = left - left % worker_batch
        batches = columns[:, :whole].reshape(len(columns), -1, worker_batch)  # (L, batches, worker_batch)
        return np.concatenate([batches.swapaxes(0, 1).reshape(-1), columns[:, whole:].reshape(-1)])

    def state_dict(self) -> dict[str, Any]:
        return {
            "turns": self._turns,
            "named": self._named,
            "visited": [torch.tensor(visited, dtype=torch.int64) for visited in self._visited],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._turns, self._named = state["turns"], state["named"]
        self._visited = [visited.tolist() for visited in state["visited"]]
        for seen, visited in zip(self._seen, self._visited, strict=True):
            seen[visited] = True

    def _rest(self, local: int) -> IntArray:
        """What comes after the units of a local worker: examples that fill none, and padding."""
        examples = self._units.examples(local, self._orders[local], self._padding[local])
        return examples[self._visits_L[local] * self._units.unit_size :]

    def _left(self, local: int) -> IntArray:
        """Examples of a local worker that have not been observed: units first, then the rest."""
        size, seen = self._units.unit_size, len(self.visited(local))
        units = self._units.group(local)[self.unvisited(local)][: self._visits_L[local] - seen]
        return np.concatenate([units.reshape(-1), self._rest(local)[(self._turns - seen) * size :]])

    def _find(self, local: int, examples: IntArray, now: list[int], now_rest: int) -> int | None:
        """The unit made of `examples`, or None if they are rest.

        `now` lists the units found in the same call before, `now_rest` counts its rows of rest.
        """
        size, total = self._units.unit_size, self._units.num_examples
        if examples.min() < 0 or examples.max() >= total:
            raise ValueError(
                f"examples {examples.tolist()} are named; the dataset has {total} of them, 0 to {total - 1}"
            )
        unit, *others = np.unique(self._units.unit_of(local, examples)).tolist()
        whole = unit >= 0 and not others and len(examples) == size
        observed = whole and (self._seen[local][unit] or unit in now)
        if whole and not observed:
            return int(unit)
        rest_seen = self._turns - len(self._visited[local]) + now_rest
        rest = self._rest(local)[rest_seen * size :]
        if len(rest) and np.isin(examples, self._rest(local)).all():
            return None
        if observed or np.isin(examples, self._rest(local)).all():
            raise ValueError(f"the unit of examples {examples.tolist()} has been observed already in this epoch")
        raise ValueError(
            f"examples {examples.tolist()} are no unit of worker {self._locals[local]}; name the {size} dataset "
            "indices behind each row, as the loader delivered them"
        )

    def _check_mode(self, *, named: bool) -> None:
        if self._turns and self._named != named:
            raise ValueError(
                f"the epoch's earlier rows came {'with' if self._named else 'without'} units=; name units in "
                "all calls of an epoch or in none"
            )

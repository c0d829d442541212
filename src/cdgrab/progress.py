"""Tracks an epoch: which units have been observed, and which are left to visit.

Rows come in the planned order, so that counting them is enough, or with their examples named, in any order. Both are
checked here before anything is recorded.

Shapes: `J` lanes of this process, `m` visits of a step, `V` visits so far; `N` units, `n` rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.fields import Fields, damaged
from cdgrab.lanes import BoolArray, IntArray, Lanes
from cdgrab.orders.fill import by_visit


@dataclass(frozen=True)
class Step:
    """The checked rows of a step.

    Attributes:
        rows: The number of rows.
        start: The first of their visits.
        visits: The number of visits.
        units_mJ: If rows are named, the unit that every lane visits, or -1.
        place_n: If rows are named, the place of each among the `m * J`, or -1 for the row of no unit.
    """

    rows: int
    start: int
    visits: int
    units_mJ: IntArray | None = None
    place_n: IntArray | None = None

    @property
    def counts_mJ(self) -> BoolArray | None:
        """Which lanes of this process have a unit, if rows are named."""
        return None if self.units_mJ is None else self.units_mJ >= 0

    def lengthened(self, visits: int) -> Step:
        """The same named rows in `visits` visits, the last of them without a unit."""
        assert self.units_mJ is not None
        missing = ((0, visits - self.visits), (0, 0))
        return replace(self, visits=visits, units_mJ=np.pad(self.units_mJ, missing, constant_values=-1))

    def by_visit(self, rows_nD: Tensor, num_lanes: int) -> Tensor:
        """The rows visit by visit, `m x J x D`. A lane without a unit has a row without meaning."""
        places = self.visits * num_lanes
        if self.place_n is not None:
            rows_ND = rows_nD.new_zeros(places, rows_nD.shape[1])
            named = np.flatnonzero(self.place_n >= 0)
            index = torch.from_numpy(self.place_n[named]).to(rows_nD.device)
            rows_ND[index] = rows_nD[torch.from_numpy(named).to(rows_nD.device)]
            rows_nD = rows_ND
        elif len(rows_nD) < places:
            rows_nD = torch.nn.functional.pad(rows_nD, (0, 0, 0, places - len(rows_nD)))
        return rows_nD.view(self.visits, num_lanes, rows_nD.shape[1])


class Progress:
    """Counts the units that one epoch has visited.

    Args:
        lanes: The lanes and their units.
        epoch: Counted from 0.
        order_N: The units of this process, visit by visit.
    """

    def __init__(self, lanes: Lanes, epoch: int, order_N: IntArray) -> None:
        self._lanes = lanes
        self._order_N = order_N
        self._padding = lanes.padding(epoch)
        self._rows = 0
        self._named = False
        self._lines: list[IntArray] = []  # units visited, `m x J` each; empty unless rows are named
        self._seen_N = np.zeros(0, dtype=bool)  # units visited; empty unless rows are named

    @property
    def rows(self) -> int:
        """The number of rows observed."""
        return self._rows

    @property
    def visits(self) -> int:
        """The number of visits so far."""
        return sum(map(len, self._lines)) if self._named else -(-self._rows // self._lanes.num_local)

    @property
    def finished(self) -> bool:
        """Whether every row of the epoch has been observed."""
        return self._rows == self._lanes.num_rows

    @property
    def samples_left(self) -> int:
        """The number of examples left to visit."""
        if self._named:
            return len(self.remaining())
        return max(0, self._lanes.num_samples - self._rows * self._lanes.unit_size)

    @property
    def num_unvisited(self) -> int:
        """The number of units whose row has not been observed."""
        return self._lanes.num_units - self._num_visited

    def due(self, units_per_batch: int) -> int:
        """The number of rows of the next batch."""
        return min(units_per_batch, self._lanes.num_rows - self._rows)

    def next_step(self, num_rows: int | None, units_per_batch: int) -> Step:
        """Check a batch of `num_rows` rows in planned order (None: do not compare); return its step."""
        self._check_mode(named=False)
        due, lanes = self.due(units_per_batch), self._lanes
        if num_rows is not None and num_rows != due:
            raise ValueError(
                f"{num_rows} rows for a batch of {due} units; pass one row for every unit of {lanes.unit_size} "
                "examples, or make the ordering with another unit_size (the batch size: one row per batch)"
            )
        start = self._rows // lanes.num_local
        return Step(due, start, -(-(self._rows + due) // lanes.num_local) - start)

    def named_step(self, num_rows: int, examples: IntArray) -> Step:
        """Check rows whose examples are named, `unit_size` per row (the last may have fewer); return their step.

        Every row goes to the next visit of its unit's lane.
        """
        self._check_mode(named=True)
        lanes, size = self._lanes, self._lanes.unit_size
        if len(examples) and examples.dtype.kind not in "iu":
            raise ValueError(f"units= has the type {examples.dtype}; pass dataset indices, whole numbers")
        named = -(-len(examples) // size)
        if named == 0 or num_rows != named:
            raise ValueError(
                f"{num_rows} rows, but {len(examples)} named examples make {named} units of {size}; name {size} "
                "examples for every row"
            )
        if self._rows + num_rows > lanes.num_rows:
            raise ValueError(f"{num_rows} rows, but the epoch has {lanes.num_rows - self._rows} units left")
        units_n = self._find(examples)
        unit_rows = np.flatnonzero(units_n >= 0)
        lane_n = lanes.lane_of(units_n[unit_rows])
        visit_n = _earlier(lane_n)
        visits = int(visit_n.max(initial=-1)) + 1
        units_mJ = np.full((visits, lanes.num_local), -1, dtype=units_n.dtype)
        units_mJ[visit_n, lane_n] = units_n[unit_rows]
        place_n = np.full(num_rows, -1)
        place_n[unit_rows] = visit_n * lanes.num_local + lane_n
        return Step(num_rows, self.visits, visits, units_mJ, place_n)

    def record(self, step: Step) -> None:
        """Count the rows of a checked step."""
        self._rows += step.rows
        if step.units_mJ is not None:
            self._named = True
            self._lines.append(step.units_mJ)
            self._seen()[step.units_mJ[step.units_mJ >= 0]] = True

    def by_visit(self) -> IntArray:
        """The units of this process's lanes, visit by visit: visited ones, then the others; -1 where there is none."""
        planned_VJ = by_visit(self._order_N, self._lanes.num_local)
        if not self._named:
            return planned_VJ
        left_VJ = np.where(self._seen()[planned_VJ], -1, planned_VJ)
        return np.concatenate([*self._lines, left_VJ])

    def planned(self) -> IntArray:
        """The examples of the whole epoch in order; raises `ValueError` if rows came in another."""
        if self._named:
            raise ValueError(
                "rows of this epoch came with units=, so batches may have come in any order; keep the indices that "
                "the loader delivered"
            )
        return self._lanes.examples(self._order_N, self._padding)

    def remaining(self) -> IntArray:
        """The examples left to visit, in the order in which a loader should deliver them."""
        lanes = self._lanes
        if not self._named:
            return self.planned()[self._rows * lanes.unit_size :]
        left_N = self._order_N[~self._seen()[self._order_N]][: lanes.num_visited - self._num_visited]
        rest_seen = (self._rows - self._num_visited) * lanes.unit_size
        return np.concatenate([lanes.units_Nu[left_N].reshape(-1), self._rest()[rest_seen:]])

    def state_dict(self) -> dict[str, Any]:
        """Rows and, if they are named, the visits: each unit by its place in the order."""
        empty = np.zeros((0, self._lanes.num_local), dtype=self._order_N.dtype)
        units_VJ = np.concatenate([empty, *self._lines])
        place_N = np.full(len(self._order_N) + 1, -1, dtype=self._order_N.dtype)
        place_N[self._order_N] = np.arange(len(self._order_N), dtype=self._order_N.dtype)
        return {"rows": self._rows, "named": self._named, "lines": torch.from_numpy(place_N[units_VJ])}

    def load_state_dict(self, state: Fields) -> None:
        """Load a state of the same order, into a fresh object."""
        lanes, num_units = self._lanes, len(self._order_N)
        self._rows, self._named = state.whole("rows", most=lanes.num_rows - 1), state.flag("named")
        limit = None if self._named else 0
        places_VJ = state.integers("lines", limit, lanes.num_local, least=-1, end=num_units).numpy()
        places = places_VJ[places_VJ >= 0]
        self._lines = [np.where(places_VJ >= 0, self._order_N[places_VJ], -1).astype(self._order_N.dtype)]
        self._seen()[self._order_N[places]] = True
        in_lane = (places_VJ < 0) | (lanes.lane_of(places_VJ) == np.arange(lanes.num_local))
        if (
            self._num_visited != (len(places) if self._named else min(self._rows, lanes.num_visited))
            or not in_lane.all()
        ):
            raise damaged(f"{state.name('lines')} is no way to visit units once each, in their lanes")
        if self._named and len(places) > self._rows:
            raise state.refuse("rows", self._rows, f"at least the {len(places)} units visited")

    @property
    def _num_visited(self) -> int:
        return int(self._seen().sum()) if self._named else min(self._rows, self._lanes.num_visited)

    def _seen(self) -> BoolArray:
        """Whether each unit's row has come. The last entry, at -1, is False: it stands for no unit."""
        if len(self._seen_N) == 0:
            self._seen_N = np.zeros(self._lanes.num_units + 1, dtype=bool)
        return self._seen_N

    def _rest(self) -> IntArray:
        """The examples after the units: those that fill none, and padding."""
        return self._lanes.examples(self._order_N, self._padding)[self._lanes.num_visited * self._lanes.unit_size :]

    def _find(self, examples: IntArray) -> IntArray:
        """The unit of each row's examples, or -1 if they are rest; raises `ValueError` if they are neither."""
        lanes, size = self._lanes, self._lanes.unit_size
        outside = examples[(examples < 0) | (examples >= lanes.num_examples)]
        if len(outside):
            raise ValueError(
                f"examples {outside.tolist()} are named; the dataset has {lanes.num_examples} of them, 0 to "
                f"{lanes.num_examples - 1}"
            )
        short = -len(examples) % size
        unit_nu = np.pad(lanes.unit_of[examples], (0, short), constant_values=-1).reshape(-1, size)
        unit_n = np.where((unit_nu == unit_nu[:, :1]).all(1), unit_nu[:, 0], -1)
        first_n = np.zeros(len(unit_n), dtype=bool)
        first_n[np.unique(unit_n, return_index=True)[1]] = True
        new_n = (unit_n >= 0) & first_n & ~self._seen()[unit_n]
        self._check_rest(examples, new_n, unit_n)
        return np.where(new_n, unit_n, -1)

    def _check_rest(self, examples: IntArray, new_n: BoolArray, unit_n: IntArray) -> None:
        """Raise `ValueError` unless all rows that are no new unit are rest, and no more than are left of it."""
        size, rest = self._lanes.unit_size, self._rest()
        left = -(-len(rest) // size) - (self._rows - self._num_visited)
        for row in np.flatnonzero(~new_n).tolist():
            mine = examples[row * size : (row + 1) * size]
            is_rest = len(rest) and np.isin(mine, rest).all()
            if is_rest and left > 0:
                left -= 1
            elif is_rest or unit_n[row] >= 0:
                raise ValueError(f"the unit of examples {mine.tolist()} has been observed already in this epoch")
            else:
                raise ValueError(
                    f"examples {mine.tolist()} are no unit of this process; name the {size} dataset indices behind "
                    "each row, as the loader delivered them"
                )

    def _check_mode(self, *, named: bool) -> None:
        if self._rows and self._named != named:
            raise ValueError(
                f"the epoch's earlier rows came {'with' if self._named else 'without'} units=; name units in "
                "all calls of an epoch or in none"
            )


def _earlier(lane_n: IntArray) -> IntArray:
    """The number of equal entries before each entry.

    Example:
        >>> _earlier(np.array([0, 1, 0, 0]))
        array([0, 0, 1, 2])
    """
    order = np.argsort(lane_n, kind="stable")
    by_lane = lane_n[order]
    first = np.searchsorted(by_lane, by_lane)
    earlier = np.empty(len(lane_n), dtype=np.int64)
    earlier[order] = np.arange(len(lane_n)) - first
    return earlier

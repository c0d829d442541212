"""Checks rows, brings them to one type and device, exchanges them with other ranks, and passes them to the sorter.

`progress.py` decides to which units they belong, `epochs.py` when an epoch ends.

Shapes: `n` rows of `D` numbers; `m` visits of this process's `J` lanes, or of all `L` lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cdgrab.balancing.sorter import Sorter, make_sorter
from cdgrab.exchange import Exchange
from cdgrab.exchange.agreement import check_same
from cdgrab.lanes import BoolArray, Lanes, generator
from cdgrab.progress import Step
from cdgrab.settings import Settings


class Sketched(NamedTuple):
    """The form of sketches."""

    length: int
    watched: int  # the last so many numbers are witnesses


class Intake:
    """Owns the sorter of an ordering, and passes checked rows to it.

    Args:
        settings: The settings of the ordering.
        exchange: Brings the rows of other ranks.
        sketched: The form of the sketches, or None if rows are whole.

    Attributes:
        sorter: None for orders without gradients: their rows are checked, then ignored.
    """

    def __init__(self, settings: Settings, exchange: Exchange, *, sketched: Sketched | None = None) -> None:
        self._settings = settings
        self._exchange = exchange
        self.sketched = sketched
        self._dim: int | None = None  # of the rows so far
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._arriving: Callable[[], None] | None = None  # passes on the rows that are on their way
        self.sorter = self._new_sorter()

    @property
    def form(self) -> str:
        """The form in which gradients come to the sorter, in words. A state fits only the same form."""
        rows = "rows" if self.sketched is None else f"sketches of {self.sketched.length} numbers"
        name = self._exchange.name
        return f"{rows} of one process" if name is None else f"{rows} (exchange {name!r})"

    def start_epoch(self, epoch: int, lanes: Lanes) -> None:
        if self.sorter is not None:
            self.sorter.start_epoch(epoch, lanes.visited_L[self._settings.sorted_lanes])

    def go_on_from(self, before: Intake) -> None:
        """Copy the state of the rules, which does not depend on the form of rows."""
        rules, earlier = ([] if one.sorter is None else one.sorter.rules for one in (self, before))
        for rule, other in zip(rules, earlier, strict=True):
            rule.load_state_dict(other.state_dict())

    def checked(self, rows: Tensor) -> Tensor:
        """The rows that a user passed, as `N x D`, of the type and on the device of the first rows."""
        if rows.ndim == 3:
            if len(rows) == 0:
                raise ValueError(f"rows have the shape {tuple(rows.shape)}, which has no step; pass at least one")
            rows = rows.flatten(0, 1)
        rows = rows.detach()
        if rows.ndim == 1:
            rows = rows[None]
        if rows.ndim != 2 or rows.shape[1] == 0 or rows.is_complex():
            raise ValueError(
                f"rows have the shape {tuple(rows.shape)} and type {rows.dtype}; expected units x dim real numbers, "
                "or steps x units x dim"
            )
        if self._dim is not None and rows.shape[1] != self._dim:
            raise ValueError(
                f"rows have {rows.shape[1]} columns, earlier ones had {self._dim}; keep the set of trainable "
                "parameters as it is, or make a new ordering"
            )
        dtype = self._dtype or (torch.float64 if rows.dtype == torch.float64 else torch.float32)
        return rows.to(self._device or rows.device, dtype)

    def take(self, rows_nD: Tensor, step: Step, lanes: Lanes) -> Step:
        """Pass the checked rows of a step to the sorter; return the step with as many visits as on all other ranks.

        Sketches travel beside training. They reach the sorter with those of the next step, or with `settle`.
        """
        settings = self._settings
        if self._dim is None and settings.coordinated and settings.ranks_meet:
            shape = {"the number of columns": rows_nD.shape[1], "the type": str(rows_nD.dtype)}
            check_same("the rows", shape, self._exchange.group)
        self._use_device(rows_nD.device)
        self._dim, self._dtype = rows_nD.shape[1], rows_nD.dtype
        if self.sorter is None:
            return step
        if settings.coordinated and settings.world.size > 1 and self._exchange.name is None:
            raise ValueError(
                f"order {settings.order!r} coordinates {settings.world.size} ranks, but torch.distributed is not "
                "initialised; call init_process_group() before making the ordering, or leave world= out"
            )
        counts_mL = step.counts_mJ
        if counts_mL is None:
            counts_mL = lanes.counts(step.start, step.visits, settings.sorted_lanes)
        elif settings.coordinated:
            counts_mL = self._exchange.counts(counts_mL)
            step = step.lengthened(len(counts_mL))
        self.settle()
        rows_mJD = step.by_visit(rows_nD, len(settings.local_lanes))
        # Nothing travels in one process, and the caller may reuse the memory of whole rows.
        if self._exchange.name is None or self.sketched is None:
            self._pass_on(partial(self._exchange.collect, rows_mJD), counts_mL)
        else:
            self._arriving = partial(self._pass_on, self._exchange.start(rows_mJD), counts_mL)
        return step

    def settle(self) -> None:
        """Wait for rows that are on their way, and pass them to the sorter."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving()

    def _pass_on(self, collect: Callable[[], Tensor | None], counts_mL: BoolArray | None) -> None:
        rows_mLD = collect()
        if self.sorter is not None and rows_mLD is not None and len(rows_mLD):  # a step may have no unit
            self.sorter.add(rows_mLD, counts_mL)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "form": self.form,
            "dim": self._dim,
            "dtype": None if self._dtype is None else str(self._dtype).removeprefix("torch."),
            "sorter": {} if self.sorter is None else self.sorter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int, lanes: Lanes) -> None:
        """Load a state, before any row has come. A state of another form must be one between epochs."""
        if state["form"] == self.form:
            self._dim = state["dim"]
            self._dtype = None if state["dtype"] is None else getattr(torch, state["dtype"])
        if self.sorter is not None and state["form"] == self.form:
            self.sorter.load_state_dict(state["sorter"])
        else:
            self.start_epoch(epoch, lanes)

    def _new_sorter(self) -> Sorter | None:
        settings = self._settings
        # Lanes that balance alone have a generator each, the same on any number of ranks.
        rngs = [generator(settings.seed, lane, "rule") for lane in settings.sorted_lanes]
        watched = 0 if self.sketched is None else self.sketched.watched
        own = self._exchange.sorter(rngs, settings.make_rule)
        return own or make_sorter(settings.spec, rngs, settings.make_rule, settings.block, watched)

    def _use_device(self, device: torch.device) -> None:
        """Keep all rows on the device of the first. A loaded state, which is on the CPU, moves there."""
        if self._device is None:
            self._device = device
            if self._dim is not None and self.sorter is not None and device.type != "cpu":
                sorter = self._new_sorter()
                assert sorter is not None
                sorter.load_state_dict(tree_map_only(Tensor, lambda part: part.to(device), self.sorter.state_dict()))
                self.sorter = sorter

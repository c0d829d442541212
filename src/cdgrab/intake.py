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

from cdgrab.balancing.sorter import Sorter, make_sorter
from cdgrab.exchange import Exchange
from cdgrab.exchange.agreement import check_same
from cdgrab.fields import Fields, damaged
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
        model: A digest of the parameters whose gradients come; None if rows are passed by hand.
        sorter: None for orders without gradients: their rows are checked, then ignored.
    """

    def __init__(
        self, settings: Settings, exchange: Exchange, *, sketched: Sketched | None = None, model: str | None = None
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self.sketched, self.model = sketched, model
        self._dim: int | None = None  # of the rows so far
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._arriving: Callable[[], None] | None = None  # passes on the rows that are on their way
        self.sorter = self._new_sorter()

    @property
    def form(self) -> str:
        """The form in which gradients come to the sorter, in words. A state fits only the same form."""
        name = self._exchange.name
        return f"{self.kind} of one process" if name is None else f"{self.kind} (exchange {name!r})"

    @property
    def kind(self) -> str:
        """What rows are, wherever they come from."""
        return "rows" if self.sketched is None else f"sketches of {self.sketched.length} numbers"

    @property
    def _watched(self) -> int:
        return 0 if self.sketched is None else self.sketched.watched

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
            "kind": self.kind,
            "watched": self._watched,
            "model": self.model,
            "dim": self._dim or 0,
            "dtype": str(self._dtype or torch.float32).removeprefix("torch."),
            "sorter": {} if self.sorter is None else self.sorter.state_dict(),
        }

    def load_state_dict(self, state: Fields, epoch: int, lanes: Lanes, visits: int) -> None:
        """Load a state into a fresh object; `visits` are those of the epoch so far.

        A state of another form, or of another model, fits only if nothing of it is needed.
        """
        form, model, dim = state.text("form"), state.text("model"), state.whole("dim")
        types = {"float32": torch.float32, "float64": torch.float64}
        dtype = types.get(state.text("dtype") or "")
        if dtype is None:
            raise state.refuse("dtype", state.raw("dtype"), "float32 or float64")
        kind, watched = state.text("kind"), state.whole("watched")
        if form == self.form and (kind, watched) != (self.kind, self._watched):
            raise damaged(f"it has {form}, and says that they are {kind} with {watched} witnesses")
        self._check_source(form, model, visits)
        same = form == self.form and model in (None, self.model or model)
        if same:
            self._dim, self._dtype, self.model = dim or None, dtype if dim else None, model or self.model
        sorter = state.inside("sorter")
        if self.sorter is None:
            return
        if not same:
            self.start_epoch(epoch, lanes)
            return
        self.sorter.load_state_dict(sorter, dim, dtype)
        if visits not in (self.sorter.visits, None if self.sorter.visits else visits * self._exchange.shares_signs):
            raise damaged(f"it has {visits} visits, and the rows of {self.sorter.visits}")

    def _check_source(self, form: str | None, model: str | None, visits: int) -> None:
        """Raise `ValueError` if gradients come in another form than the state needs to continue."""
        if self.sorter is None or (form == self.form and model in (None, self.model or model)):
            return
        found = f"gradients as {form}, and this ordering has them as {self.form}"
        if form == self.form:
            found = f"parameters whose names and shapes have the digest {model}, and here they have {self.model}"
        remedy = "make the ordering, and attach the model before loading, as it was then"
        if visits:
            raise ValueError(
                f"the state was taken within an epoch with {found}; {remedy}, or load a state taken between epochs"
            )
        if self._settings.remembers is not None:
            raise ValueError(
                f"the state was taken with {found}, and {self._settings.remembers} goes on from earlier epochs; "
                f"{remedy}"
            )

    def _new_sorter(self) -> Sorter | None:
        settings = self._settings
        # Lanes that balance alone have a generator each, the same on any number of ranks.
        rngs = [generator(settings.seed, lane, "rule") for lane in settings.sorted_lanes]
        own = self._exchange.sorter(rngs, settings.make_rule)
        return own or make_sorter(settings.spec, rngs, settings.make_rule, settings.block, self._watched)

    def _use_device(self, device: torch.device) -> None:
        """Keep all rows on the device of the first. A loaded state, which is on the CPU, moves there."""
        if self._device is None:
            self._device = device
            if self._dim is not None and self.sorter is not None and device.type != "cpu":
                sorter = self._new_sorter()
                assert sorter is not None
                saved = Fields(self.sorter.state_dict(), device=device)
                sorter.load_state_dict(saved, self._dim, self._dtype or torch.float32)
                self.sorter = sorter

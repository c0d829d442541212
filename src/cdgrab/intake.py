"""Rows on their way to the sorter: checked, of one type, on one device, joined by those of other workers.

Which units they belong to, and when an epoch ends, is decided in `ordering.py`.

Shapes: `N` rows of `D` numbers; `m` turns of `L` local workers, from `S` steps of `t` turns each; `W` workers whose
rows are sorted together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cdgrab.balancing.sorter import RowSorter, SignSorter, make_sorter
from cdgrab.exchange import BoolArray, Exchange, Local, Sharded, ShardedPairs, name_of
from cdgrab.lanes import Units, generator
from cdgrab.orders import Free
from cdgrab.settings import Settings

AnySorter = RowSorter | ShardedPairs


class Sketched(NamedTuple):
    """What short rows are like."""

    length: int
    watched: int  # numbers at their end that are witnesses


class Intake:
    """The sorter of an ordering, and the way there.

    Args:
        settings: Of the ordering.
        exchange: Brings rows of other workers.
        sketched: What rows are like if they are sketches.

    Attributes:
        sorter: None for orders without gradients; their rows are checked and left alone.
    """

    def __init__(self, settings: Settings, exchange: Exchange, *, sketched: Sketched | None = None) -> None:
        self._settings = settings
        self._exchange = exchange
        self.sketched = sketched
        self._dim: int | None = None  # of the rows so far
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self.sorter = self._new_sorter()

    @property
    def form(self) -> str:
        """In which gradients come to the sorter, in words: those of another form mean nothing to it."""
        rows = "rows" if self.sketched is None else f"sketches of {self.sketched.length} numbers"
        name = name_of(self._exchange)
        return f"{rows} of one process" if name is None else f"{rows} (exchange {name!r})"

    def start_epoch(self, epoch: int, units: Units) -> None:
        if self.sorter is not None:
            self.sorter.start_epoch(epoch, units.visits(self._settings.sorted_workers))

    def go_on_from(self, before: Intake) -> None:
        """Take over what does not depend on the form of rows: the draws of rules."""
        rules, earlier = ([] if one.sorter is None else one.sorter.rules for one in (self, before))
        for rule, other in zip(rules, earlier, strict=True):
            rule.load_state_dict(other.state_dict())

    def checked(self, rows: Tensor) -> Tensor:
        """Rows of any form that users may pass, as `N x D`, of the type and on the device of the first that came."""
        if rows.ndim == 3:
            if len(rows) == 0:
                raise ValueError(f"rows have the shape {tuple(rows.shape)}, which is no step; give at least one")
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
                f"rows have {rows.shape[1]} columns, earlier ones had {self._dim}; the set of trainable parameters "
                "must stay as it is, or a new ordering be made"
            )
        dtype = self._dtype or (torch.float64 if rows.dtype == torch.float64 else torch.float32)
        return rows.to(self._device or rows.device, dtype)

    def take(self, rows_ND: Tensor, steps: int, counts_Lm: BoolArray | None) -> None:
        """Take the checked rows of so many steps; `counts_Lm` says which of them are units, if not all are."""
        self._settle_on(rows_ND.device)
        self._dim, self._dtype = rows_ND.shape[1], rows_ND.dtype
        if self.sorter is None:
            return
        world = self._settings.world
        # Worker by worker within a step, turn by turn over all of them.
        rows_SLtD = rows_ND.view(steps, len(world.local_workers), -1, rows_ND.shape[1])
        rows_mLD = rows_SLtD.transpose(1, 2)
        if counts_Lm is not None or not isinstance(self.sorter, SignSorter) or not world.one_process:
            rows_mLD = rows_mLD.flatten(0, 1)
        self._sort(self.sorter, rows_mLD, None if counts_Lm is None else counts_Lm.T)

    def state_dict(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "dim": self._dim,
            "dtype": None if self._dtype is None else str(self._dtype).removeprefix("torch."),
            "sorter": {} if self.sorter is None else self.sorter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int, units: Units) -> None:
        """To be called before any row has come. One form takes over from another only between epochs."""
        if state["form"] == self.form:
            self._dim = state["dim"]
            self._dtype = None if state["dtype"] is None else getattr(torch, state["dtype"])
        if self.sorter is not None and state["form"] == self.form:
            self.sorter.load_state_dict(state["sorter"])
        else:
            self.start_epoch(epoch, units)

    def _new_sorter(self) -> AnySorter | None:
        settings = self._settings
        if isinstance(settings.spec, Free):
            return None
        # Ranks that balance alone sort one worker each; their draws must differ all the same.
        rngs = [generator(settings.seed, worker, "rule") for worker in settings.sorted_workers]
        if isinstance(self._exchange, Sharded):
            return ShardedPairs(len(rngs), self._exchange, settings.make_rule(rngs[0]))
        watched = 0 if self.sketched is None else self.sketched.watched
        return make_sorter(settings.spec, rngs, settings.make_rule, settings.block, watched)

    def _settle_on(self, device: torch.device) -> None:
        """Rows stay on the device of the first of them; a loaded state, which is on the CPU, follows."""
        if self._device is None:
            self._device = device
            if self._dim is not None and self.sorter is not None and device.type != "cpu":
                sorter = self._new_sorter()
                assert sorter is not None
                sorter.load_state_dict(tree_map_only(Tensor, lambda part: part.to(device), self.sorter.state_dict()))
                self.sorter = sorter

    def _sort(self, sorter: AnySorter, rows_mLD: Tensor, counts_mL: BoolArray | None) -> None:
        settings, world = self._settings, self._settings.world
        if settings.coordinated and world.size > 1 and isinstance(self._exchange, Local) and not world.one_process:
            raise ValueError(
                f"order {settings.order!r} coordinates {world.size} ranks, but torch.distributed is not "
                "initialised; call init_process_group() before making the ordering, or use World.simulated()"
            )
        rows_mWD, counts_mW = self._exchange.collect(rows_mLD, counts_mL)
        if rows_mWD is None:
            return
        if isinstance(sorter, ShardedPairs):
            assert counts_mW is not None
            for slices_Wc, counts_W in zip(rows_mWD, counts_mW, strict=True):
                sorter.add_turn(slices_Wc, counts_W)
            return
        # Padding comes last: whole turns first, all at once, then row by row.
        whole = len(rows_mWD) if counts_mW is None else int(counts_mW.all(1).cumprod().sum())
        if whole:
            sorter.add(rows_mWD[:whole])
        for turn, worker in [] if counts_mW is None else np.argwhere(counts_mW[whole:]):
            sorter.add_one(rows_mWD[whole + turn, worker], worker)

"""The state of the sorters of all processes that saved, as that of one sorter which has all lanes.

Sorters of processes have whole rows of all lanes, whole rows of their own, or slices of rows.

Shapes: `W` processes, `L` lanes of all; `D` numbers in a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.balancing.sorter import SignSorter
from cdgrab.exchange.sharded import slice_of, whole_of
from cdgrab.fields import Fields
from cdgrab.lanes import generator
from cdgrab.orders import Balanced
from cdgrab.orders.decisions import Decisions
from cdgrab.orders.fill import SignArray
from cdgrab.settings import Settings

State = dict[str, Any]


class WorldSorter:
    """What is known of the rows of an epoch.

    Args:
        settings: Those of the processes that saved.
        state: The state of a `SignSorter` with all lanes; None if no process has whole rows, or the order needs none.
        decisions: The state of the signs, if there are any.
        part: A process's part of the state.
        watched: The number of witnesses in a row.
    """

    def __init__(
        self, settings: Settings, state: State | None, decisions: State | None, part: Fields, watched: int
    ) -> None:
        self.dim = part.whole("dim") if state is not None else 0
        self._settings, self._state, self._decisions = settings, state, decisions
        self._dtype = {"float64": torch.float64}.get(part.text("dtype") or "", torch.float32)
        self._watched = watched

    @classmethod
    def of(cls, settings: Settings, parts: list[Fields]) -> WorldSorter:
        """The sorter of all processes, from their parts in the order of ranks."""
        states, first = [part.inside("sorter").values for part in parts], parts[0]
        watched = first.whole("watched")
        if not isinstance(settings.spec, Balanced) or not states[0]:
            return cls(settings, states[0] or None, None, first, watched)
        if "second" in states[0]:
            whole = whole_of(states, first.whole("dim"))
            return cls(settings, whole, states[0]["decisions"], first, watched)
        if settings.coordinated:  # all processes have the same, or the first has all
            return cls(settings, states[0], states[0]["decisions"], first, watched)
        together = _lanes_together(states, settings)
        return cls(settings, together, together["decisions"], first, watched)

    def unit_signs(self) -> SignArray:
        """The sign of every unit, visit by visit, once all rows that wait are balanced; 0 where there is none."""
        if not isinstance(self._settings.spec, Balanced):
            return np.zeros((0, self._settings.lanes), dtype=np.int8)
        if self._state is not None:
            return self._settled().decisions.of_units()
        decisions = Decisions(self._settings.lanes, paired=self._settings.balances_pairs)
        decisions.load_state_dict(Fields(self._decisions, "decisions"))
        return decisions.of_units()

    def for_lanes(self, fresh: State, settings: Settings) -> State:
        """The state of a process's sorter, if lanes stay the same."""
        if self._state is None or not isinstance(settings.spec, Balanced):
            return self._state or fresh
        if "second" in fresh:
            state = self._settled().state_dict()
            return slice_of(state, self.dim, settings.world.rank, settings.world.size)
        return self._state if settings.coordinated else _lanes_of(self._state, settings)

    def dealt_anew(self, fresh: State, settings: Settings, signs: list[int]) -> State:
        """The state of a process's sorter with other lanes, whose visits so far have these signs."""
        if not isinstance(settings.spec, Balanced):
            return fresh
        paired = settings.balances_pairs
        lanes = len(settings.sorted_lanes)
        decisions = Decisions(lanes, paired=paired)
        lines = np.array(signs[::2] if paired else signs, dtype=np.int8)
        decisions.append(np.repeat(lines, lanes))
        state = {**fresh, "decisions": decisions.state_dict()}
        if self._state is None:
            return state
        before = self._settled().state_dict()
        if not paired:
            # Lanes are made of others: each begins with what the old ones have in common.
            mean_LD = before["centring"]["mean"].mean(0, keepdim=True).expand(lanes, -1)
            none = torch.zeros(lanes, dtype=self._dtype if mean_LD.shape[1] else torch.float32)
            state["centring"] = {"mean": mean_LD.clone(), "total": torch.zeros_like(mean_LD).clone(), "count": none}
        if settings.coordinated:
            state["balancers"] = before["balancers"]
            if "second" in fresh:
                sliced = slice_of(before, self.dim, settings.world.rank, settings.world.size, held=False)
                state = {**sliced, "decisions": state["decisions"], "first": fresh["first"]}
        return state

    def _settled(self) -> SignSorter:
        """A sorter of all lanes in which no row waits but the first of a pair."""
        settings = self._settings
        assert isinstance(settings.spec, Balanced)
        rngs = [generator(settings.seed, lane, "rule") for lane in range(settings.lanes)]
        sorter = SignSorter(settings.spec, rngs, settings.make_rule, settings.block, self._watched)
        sorter.load_state_dict(Fields(self._state, "sorter"), self.dim, self._dtype)
        sorter.close()
        return sorter


def _lanes_together(states: list[State], settings: Settings) -> State:
    """One state of all lanes, from processes that balance their own."""

    def both(tensors: list[Tensor], dim: int) -> Tensor:
        return torch.stack(tensors, dim=dim + 1).flatten(dim, dim + 1)

    signs = []
    for state in states:
        decisions = Decisions(settings.lanes // len(states), paired=settings.balances_pairs)
        decisions.load_state_dict(Fields(state["decisions"], "decisions"))
        signs.append(torch.from_numpy(decisions.joined()))
    longest = max(map(len, signs))
    signs = [torch.nn.functional.pad(one, (0, 0, 0, longest - len(one))) for one in signs]
    decisions = Decisions(settings.lanes, paired=settings.balances_pairs)
    decisions.replace(both(signs, 1).numpy())
    centrings = [state["centring"] for state in states]
    centring = {
        key: both([one[key] for one in centrings], 0) if isinstance(value, Tensor) else value
        for key, value in centrings[0].items()
    }
    width = {len(state["waiting"]) for state in states}
    waiting = both([state["waiting"] for state in states], 1) if len(width) == 1 else states[0]["waiting"]
    balancers = [states[lane % len(states)]["balancers"][lane // len(states)] for lane in range(settings.lanes)]
    return {"centring": centring, "waiting": waiting, "decisions": decisions.state_dict(), "balancers": balancers}


def _lanes_of(state: State, settings: Settings) -> State:
    """The lanes of one process, from a state of all."""
    mine = slice(settings.world.rank, None, settings.world.size)
    decisions = Decisions(settings.lanes, paired=settings.balances_pairs)
    decisions.load_state_dict(Fields(state["decisions"], "decisions"))
    own = Decisions(settings.lanes // settings.world.size, paired=settings.balances_pairs)
    own.replace(decisions.joined()[:, mine].copy())
    centring = {
        key: value[mine].clone() if isinstance(value, Tensor) else value for key, value in state["centring"].items()
    }
    return {
        "centring": centring,
        "waiting": state["waiting"][:, mine].clone(),
        "decisions": own.state_dict(),
        "balancers": state["balancers"][mine],
    }

"""PairBalance on records: signs from inner products of factors, or of rows that are there a few at a time.

Examples of two turns make the pairs. A pair's difference is a record with the factors of both; its table comes from the
parameters one by one, and so does the update of the running sum, which has the shape of the model.

Memory: the running sum, and the factors of one turn between two steps. Where pairs are replayed on a GPU, copies of two
turns instead, and what their graph needs for itself.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance.rules import Greedy, Rule
from cdgrab.balance.tally import Tally
from cdgrab.decisions import Decisions
from cdgrab.exchange.base import BoolArray
from cdgrab.ghost import compiled
from cdgrab.ghost.pairs import (
    MOST_BYTES,
    ReplayedPairs,
    RunningSum,
    balance,
    difference,
    replayable,
    small_enough,
    work_of,
)
from cdgrab.ghost.passes import Batch, Home, Pass, Seen
from cdgrab.ghost.records import Lookup, Matrix, Record, Rows, stacked, taken
from cdgrab.units import IntArray

log = logging.getLogger("cdgrab")
_MANY = 1024  # turns that are counted together
_MOST_MISSED = 64  # steps in a row that were not like those that have been recorded
_KINDS: dict[str, type[Any]] = {"Rows": Rows, "Matrix": Matrix, "Lookup": Lookup}


class GhostPairs:
    """A sorter whose rows are records. Shapes: `W` workers, all in this process, `m` turns in a step."""

    def __init__(self, num_workers: int, rule: Rule) -> None:
        self._num_workers = num_workers
        self._rule = rule
        self._tally = Tally()
        self._sum = RunningSum()
        self._held: Pass | None = None  # the first of each pair, until the second comes
        self._all_W = np.ones(num_workers, dtype=bool)
        self._held_W = ~self._all_W  # whose was a unit
        self._held_alike = False  # whether it was a step of its own
        self._balanced = False  # whether there have been pairs yet
        self._recordable = type(rule) is Greedy
        self._replayed: ReplayedPairs | None = None
        self._homes = Home(), Home()  # of the first and the second of a pair
        self._copied = 0  # bytes of the pass under way
        self._missed = 0  # steps that were copied for nothing, since the last that were replayed
        self._small = False  # whether turns are small enough for that
        self._decisions = Decisions()
        # What was decided since, `4 x W` each; counted together, as one by one takes long.
        self._late: list[Tensor] = []

    @property
    def running_sum(self) -> dict[str, Tensor]:
        """By parameter."""
        return self._sum.parts

    @property
    def decisions(self) -> Decisions:
        self._settle()
        return self._decisions

    @property
    def looks_later(self) -> bool:
        """Whether turns had better come with what layers saw, and not with records."""
        return self._recordable and self._small

    def keep(self, seen: list[Seen], start: int) -> list[Seen]:
        """Copy what layers saw in the pass under way, where number `start` is the first of these, if it pays.

        Otherwise only inputs from outside, which somebody may change before the pair is complete.
        """
        self._copied = (self._copied if start else 0) + sum(one.nbytes for one in seen)
        if self._recordable and 2 * self._copied <= MOST_BYTES:
            try:
                return self._homes[self._held is not None].keep(seen, start)
            except torch.OutOfMemoryError as error:
                self._give_up(error)
        return [one.owned() for one in seen]

    def add(self, step: Pass, shapes: dict[str, torch.Size], turns: int, counts_mW: BoolArray | None = None) -> None:
        """Take so many turns, worker by worker; `counts_mW` says which of the examples are units, if not all are.

        What the step holds is kept until the next, and must not change meanwhile.
        """
        alike = turns == 1 and counts_mW is None
        if alike and self._replayed is not None and self._add_alike(step):
            return
        workers = self._num_workers
        counts_mW = np.ones((turns, workers), dtype=bool) if counts_mW is None else counts_mW
        self._missed += bool(step.seen)
        batch = step.records()
        if self._missed > _MOST_MISSED:  # passes are not alike, and need no copies
            self._forget_recording()
            self._recordable = False
        self._make_room(batch, shapes)
        if alike:
            self._small = small_enough(step)
            if self._add_alike(step):
                return
        start = 0
        firsts, seconds, counts, alone = [], [], [], []
        if self._held is not None:
            firsts, seconds = [self._held.records()], [self._pick(batch, 0, turns)]
            counts = [self._held_W & counts_mW[0]]
            alone = [self._held_W ^ counts_mW[0]]
            self._held, start = None, 1
        whole = start + (turns - start) // 2 * 2
        for turn in range(start, whole, 2):
            firsts.append(self._pick(batch, turn, turns))
            seconds.append(self._pick(batch, turn + 1, turns))
            counts.append(counts_mW[turn] & counts_mW[turn + 1])
            alone.append(counts_mW[turn] ^ counts_mW[turn + 1])
        if firsts:
            pairs = [difference(first, second) for first, second in zip(firsts, seconds, strict=True)]
            names = dict.fromkeys(name for pair in pairs for name in pair)
            self._balance({name: stacked(_filled(pairs, name)) for name in names}, np.concatenate(counts))
        for alone_W in alone:  # a unit without a partner is the last of its worker
            self._alone(alone_W)
        if whole < turns:
            # Unless it is to be recorded it is held as records: they may be less, and what layers saw might change.
            to_come = alike and self._replayed is None and self.looks_later
            self._held = step if to_come else Pass.of(self._pick(batch, whole, turns))
            self._held_W, self._held_alike = counts_mW[whole], turns == 1

    def _add_alike(self, step: Pass) -> bool:
        """Take a turn of all workers the fast way, if there is one; kernels are compiled by the first pairs, before."""
        replayed = self._replayed
        if self._held is None:
            if replayed is None or not replayed.take_first(step):
                return False
            self._held, self._held_W = replayed.first, self._all_W
            return True
        if self._held_W is not self._all_W and not self._held_W.all():
            return False
        decided_4K: Tensor | None = None
        if replayed is not None:
            decided_4K = replayed.take_second(step) if self._held is replayed.first else None
        elif self._balanced and self._recordable and self._held_alike and replayable(self._held, step, self._sum):
            decided_4K = self._first_replayed(self._held, step)
        if decided_4K is None:
            return False
        self._held, self._missed = None, 0
        self._decide_late(decided_4K)
        return True

    def _first_replayed(self, first: Pass, second: Pass) -> Tensor | None:
        """Balance pairs in the way that is recorded then; None if there is no room."""
        try:
            replayed = ReplayedPairs(first, second, self._sum, self._rule)
        except RuntimeError as error:
            self._give_up(error)
            return None
        decided_4K = replayed.balance()
        try:
            replayed.record()
            self._replayed = replayed
            for home, one in zip(self._homes, (first, second), strict=True):
                home.settle(one.seen)
        except RuntimeError as error:  # too little memory, or something CUDA does not record
            self._give_up(error)
        return decided_4K

    def _give_up(self, error: RuntimeError) -> None:
        self._forget_recording()
        self._recordable = False
        log.warning("pairs cannot be recorded as a CUDA graph, and are balanced without: %s", error)

    def _forget_recording(self) -> None:
        self._replayed, self._homes, self._missed = None, (Home(), Home()), 0

    def _pick(self, batch: Batch, turn: int, turns: int) -> Batch:
        """The examples of one turn."""
        if turns == 1:
            return batch
        index = torch.arange(self._num_workers) * turns + turn
        return {name: taken(record, index.to(record.tensors[0].device)) for name, record in batch.items()}

    def _alone(self, alone_W: BoolArray) -> None:
        """Units whose partner is none stay in the middle."""
        if alone_W.any():  # otherwise what is decided may be counted later
            workers = np.flatnonzero(alone_W)
            self.decisions.append(workers, np.zeros(len(workers), dtype=np.int8))

    def _balance(self, pairs: Batch, active_K: BoolArray) -> None:
        index = np.flatnonzero(active_K)
        if not len(index):
            return
        if not active_K.all():
            pairs = {name: taken(record, torch.from_numpy(index)) for name, record in pairs.items()}
        self._balanced = True
        if type(self._rule) is Greedy and compiled.takes(pairs, self.running_sum):
            decided_4K = torch.from_numpy(compiled.pair_signs(pairs, self.running_sum))
        else:
            decided_4K = balance(work_of(pairs, self._sum), self._rule)
        if len(index) == self._num_workers and active_K.size == len(index):
            self._decide_late(decided_4K)
        else:
            self._count(decided_4K, index)

    def _decide_late(self, decided_4K: Tensor) -> None:
        """Count the signs of a turn of all workers, together with others."""
        if self._late and self._late[0].device != decided_4K.device:  # the model has moved
            self._settle()
        self._late.append(decided_4K)
        if len(self._late) > _MANY:
            self._settle()

    def _count(self, decided_4K: Tensor, index: IntArray) -> None:
        self._settle()
        self._tally.add_decided(decided_4K)
        self._decisions.append_pairs(index % self._num_workers, decided_4K[0])

    def _settle(self) -> None:
        late, self._late = self._late, []
        if late:
            self._count(torch.cat(late, dim=1), np.arange(len(late) * self._num_workers))

    def _make_room(self, batch: Batch, shapes: dict[str, torch.Size]) -> None:
        if self._sum.make_room(batch, shapes):
            self._forget_recording()
        device = next(iter(batch.values())).tensors[-1].device
        if all(part.device == device for part in self.running_sum.values()):
            return
        # A loaded state follows the model. What was recorded has been recorded on the other device.
        self._forget_recording()
        self._sum.load({name: part.to(device) for name, part in self.running_sum.items()})
        if self._held is not None:
            held = self._held.records()
            self._held = Pass.of(
                {name: record.like(tuple(t.to(device) for t in record.tensors)) for name, record in held.items()}
            )

    # Sorter

    def start_epoch(self, epoch: int, visits: IntArray) -> None:
        self._held = None
        self._decisions, self._late = Decisions(), []
        self._tally = Tally()
        self._sum.zero_()
        self._rule.start_epoch(epoch, int((visits // 2).sum()))

    def close(self) -> None:
        pass

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        return self.decisions.arrange(worker, visited_N, unvisited_M)

    def tallies(self) -> list[Tally]:
        self._settle()
        return [self._tally.settled()]

    def state_dict(self) -> dict[str, Any]:
        held = None
        if self._held is not None:
            held = {
                name: {
                    "kind": type(record).__name__,
                    "tensors": [tensor.clone() for tensor in record.tensors],
                    "num_rows": record.num_rows if isinstance(record, Lookup) else 0,
                }
                for name, record in self._held.records().items()
            }
        return {
            "held": held,
            "held_workers": torch.from_numpy(self._held_W.copy()),
            "running_sum": {name: tensor.clone() for name, tensor in self.running_sum.items()},
            "decisions": self.decisions.state_dict(),
            "tally": asdict(self.tallies()[0]),
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = None
        if state["held"] is not None:
            self._held = Pass.of(
                {
                    name: _KINDS[kept["kind"]](
                        *(tensor.clone() for tensor in kept["tensors"]),
                        *[kept["num_rows"]] * (kept["kind"] == "Lookup"),
                    )
                    for name, kept in state["held"].items()
                }
            )
        self._held_W = state["held_workers"].cpu().numpy().copy()
        self._sum.load(state["running_sum"])
        self._forget_recording()  # it was made with the running sum that has been replaced
        self._late = []
        self._decisions.load_state_dict(state["decisions"])
        self._tally = Tally(**state["tally"])
        self._rule.load_state_dict(state["rule"])


def _filled(pairs: list[Batch], name: str) -> list[Record]:
    """The records of a parameter, with zeros where it got no gradient."""
    some = next(pair[name] for pair in pairs if name in pair)
    rows = None if all(name in pair for pair in pairs) else some.rows()
    return [pair[name] if rows is None or name in pair else Rows(torch.zeros_like(rows)) for pair in pairs]

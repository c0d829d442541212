"""The epochs of an ordering: the order in force, and how rows make the next one.

This module holds all that changes while an ordering lives. Users hold an `Ordering`; a source of gradients talks to
`Epochs`, through `cdgrab.sources.Port`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.arguments import as_rows
from cdgrab.balancing.tally import Tally
from cdgrab.deliveries import Deliveries
from cdgrab.elastic import Saved, part_for
from cdgrab.exchange.agreement import check_digest
from cdgrab.exchange.collectives import LostPeer, waiting_for
from cdgrab.exchange.connection import Connection
from cdgrab.exchange.sharded import ShardedPairs
from cdgrab.fields import Fields, damaged
from cdgrab.intake import Intake, Sketched
from cdgrab.lanes import IntArray, Lanes, narrowest, samples_each
from cdgrab.metrics import Meter, loaded_figures
from cdgrab.orders import Free
from cdgrab.orders.fill import from_lanes
from cdgrab.progress import Progress
from cdgrab.settings import Settings
from cdgrab.sources.port import CountedStep

log = logging.getLogger("cdgrab")


class Epochs:
    """Takes the rows of the epoch under way, and ends it. Implements `cdgrab.sources.Port`.

    Args:
        settings: The checked arguments of the ordering.
        connection: The exchange with other ranks, and their group.
        lanes: The lanes, as dealt in the first epoch.

    Attributes:
        epoch: Counted from 0.
        lanes: The lanes, as dealt in this epoch.
        order_N: The units of this process, visit by visit.
        progress: Which units of the epoch have been observed.
        intake: Checks rows and passes them to the sorter.
        meter: The time spent on ordering, and the figures of the last epoch.
        deliveries: What the sampler has handed out.
    """

    def __init__(self, settings: Settings, connection: Connection, lanes: Lanes) -> None:
        self.settings, self._connection = settings, connection
        self._lock = _Lock()
        self.epoch = 0
        self.meter = Meter()
        self.deliveries = Deliveries(settings)
        self._dealt = self.lanes = lanes
        self.order_N = _as_dealt(lanes)
        self.progress = Progress(self.lanes, 0, self.order_N)
        self.intake = Intake(settings, connection.exchange)
        self.intake.start_epoch(0, self.lanes)

    # What a source may ask

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._connection.group

    @property
    def balances(self) -> bool:
        return self.intake.sorter is not None

    @property
    def slices(self) -> ShardedPairs | None:
        sorter = self.intake.sorter
        return sorter if isinstance(sorter, ShardedPairs) else None

    @property
    def at_start(self) -> bool:
        return self.progress.rows == 0

    @property
    def is_over(self) -> bool:
        return self.progress.finished

    def examples_due(self) -> int:
        return self.progress.due(self.settings.units_per_batch)

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent since the first step."""
        return self._connection.exchange.bytes_sent

    # What it may tell

    def expect(self, sketched: Sketched | None, *, model: str | None = None, anew: bool = False) -> None:
        if sketched == self.intake.sketched and not anew and model in (None, self.intake.model or model):
            self.intake.model = model or self.intake.model
            return
        if self.progress.rows and self.balances:
            raise ValueError(
                f"{self.progress.rows} rows of this epoch have been observed already, as {self.intake.form}; continue "
                "with these, or begin another epoch with set_epoch()"
            )
        self._connection.use_for(sketched=sketched is not None)
        before = self.intake
        self.intake = Intake(self.settings, self._connection.exchange, sketched=sketched, model=model)
        self.intake.go_on_from(before)
        self.intake.start_epoch(self.epoch, self.lanes)

    def observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        with self._lock:
            with self.meter.timed():
                self._take(rows, units)
            self.end_epoch_if_due()

    def make_batches_units(self) -> bool:
        if self.settings.units_are_given or self.epoch or self.progress.rows:
            return False
        self.settings = self.settings.with_batches_as_units()
        self._dealt = self.lanes = self.settings.deal(0)
        self.order_N = _as_dealt(self.lanes)
        self.progress = Progress(self.lanes, 0, self.order_N)
        self.intake = Intake(self.settings, self._connection.exchange, sketched=self.intake.sketched)
        self.intake.start_epoch(0, self.lanes)
        return True

    def count_step(self) -> CountedStep:
        step = self.progress.next_step(None, self.settings.units_per_batch)
        counts_mL = self.lanes.counts(step.start, step.visits, self.settings.sorted_lanes)
        self.progress.record(step)
        self._check_delivered()
        counts_L = np.ones(self.settings.lanes, dtype=bool) if counts_mL is None else counts_mL[0]
        return CountedStep(counts_L, self.progress.finished)

    def end_epoch_if_due(self) -> None:
        if self.progress.finished:
            self.next_epoch(self.epoch + 1)

    def covers(self, share: float) -> None:
        self.meter.balanced = share

    def timed(self) -> AbstractContextManager[None]:
        return self.meter.timed()

    def sent(self, num_bytes: int) -> None:
        self._connection.exchange.bytes_sent += num_bytes

    # The end of an epoch

    def next_epoch(self, epoch: int) -> None:
        """End the epoch with the rows observed so far, and put the next order in force."""
        with self.meter.timed():
            tallies = self._arrange()
        self.deliveries.end_epoch(self.epoch, attached=self.progress.finished and self.intake.model is not None)
        if self.progress.rows:
            self.meter.finish(self.epoch, tallies, self.progress.num_unvisited, self.bytes_sent)

        self.epoch, self.meter.seconds = epoch, 0.0
        spec = self.settings.spec
        self.lanes = replace(self.lanes, num_samples=self._dealt.num_samples)  # what was dealt anew may have had fewer
        if isinstance(spec, Free):
            self.lanes = self._dealt_in(epoch)
            self.order_N = self._baseline(spec, epoch)
        self.intake.start_epoch(epoch, self.lanes)
        # Last, because another thread that sees an unfinished epoch may begin to count its steps.
        self.progress = Progress(self.lanes, epoch, self.order_N)

    def _baseline(self, spec: Free, epoch: int) -> IntArray:
        """The order of an epoch that needs no gradients, lane by lane."""
        num_lanes, num_units = self.lanes.num_local, self.lanes.num_units
        planned = []
        for local, lane in enumerate(self.settings.local_lanes):
            units = np.arange(local, num_units, num_lanes, dtype=self.order_N.dtype)
            planned.append(units[spec.baseline(len(units), self.settings.seed, epoch, lane)])
        return from_lanes(planned)

    def _arrange(self) -> list[Tally]:
        """Turn the epoch's signs into the next order, after checking that ranks agree on them; return the tallies."""
        sorter, settings = self.intake.sorter, self.settings
        if sorter is None:
            return []
        mine = slice(None)
        with self._saying_where():
            self.intake.settle()
            sorter.close()
            tallies = sorter.tallies()
            if settings.coordinated:
                mine = slice(settings.world.rank, None, settings.world.size)
                if settings.ranks_meet:
                    sorter.decisions.replace(self._connection.exchange.share(sorter.decisions.joined()))
                    check_digest(self.epoch, sorter.decisions.digest(), self._connection.group)
        self.order_N = sorter.arrange(self.progress.by_visit(), mine)
        return tallies

    def _take(self, rows: Tensor, units: Tensor | None) -> None:
        rows = as_rows(rows)
        rows_ND = self.intake.checked(rows)
        steps = len(rows) if rows.ndim == 3 else 1
        if units is None:
            units_due = steps * self.settings.units_per_batch
            step = self.progress.next_step(len(rows_ND) if self.balances else None, units_due)
        elif rows.ndim == 3:
            raise ValueError("rows of several steps come in planned order; pass them without units=")
        else:
            examples = torch.as_tensor(units).reshape(-1).cpu().numpy()
            step = self.progress.named_step(len(rows_ND), examples)
        # All checks are done: the step is recorded.
        with self._saying_where():
            step = self.intake.take(rows_ND, step, self.lanes)
        self.progress.record(step)
        self._check_delivered()

    @contextmanager
    def _saying_where(self) -> Iterator[None]:
        try:
            yield
        except LostPeer as lost:
            step = self.progress.rows // self.settings.units_per_batch
            raise LostPeer(f"epoch {self.epoch}, step {step}: {lost}") from lost.__cause__

    def _check_delivered(self) -> None:
        self.deliveries.check_step(self.epoch, self.lanes.num_samples - self.progress.samples_left)

    def close(self) -> None:
        """Destroy the process group that ordering made for itself."""
        self.intake.settle()
        self._connection.close()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state of this process. Its examples are saved in the order of the epoch, so units need no numbers."""
        return {
            **self.intake.state_dict(),
            "examples": torch.from_numpy(self.lanes.in_order(self.order_N)),
            "samples": self.lanes.num_samples,
            "progress": self.progress.state_dict(),
            "metrics": dict(self.meter.figures),
            "seconds": self.meter.seconds,
        }

    def all_states(self) -> dict[int, Any]:
        """The states of all processes, by rank; of this one alone, if it cannot reach the others."""
        settings, mine = self.settings, self.state_dict()
        if not settings.ranks_meet:
            return {settings.world.rank: mine}
        if self._connection.exchange.replicates and settings.world.rank:
            mine["sorter"] = None
        everyone: list[Any] = [None] * settings.world.size
        with self._saying_where(), waiting_for("the state (all ranks call state_dict())", self._connection.group):
            dist.all_gather_object(everyone, mine, group=self._connection.group)
        return dict(enumerate(everyone))

    def load_state_dict(self, saved: Saved) -> None:
        """Continue with the state of all processes, or of this one. One that is refused changes nothing."""
        epoch, settings = saved.epoch, self.settings
        dealt = self._dealt_in(epoch)
        intake = Intake(settings, self._connection.exchange, sketched=self.intake.sketched, model=self.intake.model)
        intake.start_epoch(epoch, dealt)
        fresh = None if intake.sorter is None else intake.sorter.state_dict()
        state, line = part_for(settings, saved, dealt, fresh, intake.form)
        samples = state.whole("samples", least=1, most=samples_each(dealt.num_examples, dealt.world))
        examples = _examples(state, len(dealt.shard), dealt.num_examples)
        lanes = replace(dealt, shard=examples, num_samples=samples)
        order_N = _as_dealt(lanes)
        progress = Progress(lanes, epoch, order_N)
        progress.load_state_dict(state.inside("progress"))
        intake.load_state_dict(state, epoch, lanes, progress.visits)
        figures, seconds = loaded_figures(state.inside("metrics")), state.number("seconds", least=0.0)
        # Nothing below can fail.
        self.epoch, self.lanes, self.order_N, self.progress, self.intake = epoch, lanes, order_N, progress, intake
        self.meter.figures, self.meter.seconds = figures, seconds
        if line is not None and settings.world.rank == 0:
            log.warning(line)

    def _dealt_in(self, epoch: int) -> Lanes:
        """The lanes as the seed deals them."""
        return self.settings.deal(epoch) if self.settings.spec.redeal else self._dealt


def _as_dealt(lanes: Lanes) -> IntArray:
    return np.arange(lanes.num_units, dtype=narrowest(lanes.num_units))


def _examples(state: Fields, count: int, num_examples: int) -> IntArray:
    """The examples of a process, each of them once."""
    examples: IntArray = state.integers("examples", count, least=0, end=num_examples).numpy()
    found = np.zeros(num_examples, dtype=bool)
    found[examples] = True
    if np.count_nonzero(found) != count:
        raise damaged(f"{state.name('examples')} has some of {count} examples twice")
    return examples.astype(narrowest(num_examples), copy=False)


class _Lock:
    """A lock that may be copied together with the object it guards; the copy is a new lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lock, ()

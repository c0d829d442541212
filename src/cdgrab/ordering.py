"""`Ordering` joins the steps: order -> sampler -> loader -> rows -> exchange -> sorter -> next order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cdgrab import state as checkpoint
from cdgrab.arguments import whole_number
from cdgrab.balancing.rules import RuleMaker
from cdgrab.balancing.sorter import Sorter
from cdgrab.balancing.tally import Tally
from cdgrab.exchange import ExchangeMaker
from cdgrab.exchange.agreement import check_digest
from cdgrab.exchange.connection import Connection
from cdgrab.intake import Intake, Sketched
from cdgrab.lanes import IntArray, narrowest
from cdgrab.metrics import Meter
from cdgrab.orders import Free
from cdgrab.orders.fill import from_lanes
from cdgrab.per_example.sketch import DEFAULT_LENGTH
from cdgrab.progress import Progress
from cdgrab.sampler import OrderedSampler
from cdgrab.settings import Settings
from cdgrab.sources import Attachment, CountedStep
from cdgrab.world import Group, World

log = logging.getLogger("cdgrab")


class Ordering:
    """Finds, epoch by epoch, the order in which gradients balance out.

    Args:
        dataset: A map-style dataset, or its length.
        batch_size: The batch size of the loader, on each rank.
        unit_size: Examples per unit. By default a whole batch is one unit, which is what a plain `backward()` gives a
            gradient of; 1 orders single examples and needs one row per example. Orders without gradients shuffle
            single examples by default.
        lanes: How many sequences of units are reordered, each on its own and in step with the others: the paper's
            workers. By default one for every unit of the global batch (all ranks' batches together). Rank `k` of `W`
            has the lanes `l` with `l mod W == k`.
        order: `"cd-grab"` or another name in `cdgrab.ORDERS`.
        rule: `"greedy"`, `"walk"`, `"halving"`, or a function that makes a rule from a random generator.
        world: Rank and number of processes; by default what `torch.distributed` says.
        seed: Seed of the first order and of everything random.
        drop_last: Leave out of every epoch what does not fill a batch on every rank. Units that were left out come
            in the middle of the next epoch; examples that fill no unit (fewer than `unit_size` on each rank, none if
            it is 1) are never visited. Without it the last batch is short, and ranks with one example less repeat
            one, as with `DistributedSampler`.
        group: The ranks among which data are dealt: a process group or a dimension of a device mesh; by default all.
        exchange: How ranks bring their rows together: `"sharded"` (default for `cd-grab`; the price of an all-reduce),
            `"gather"` (default for the other coordinated orders), `"server"`, or a function that makes one from a
            process group.
        block: Rows to collect before signs are decided; by default it adapts to their length. Changes
            cost, not results.

    Example:
        >>> ordering = Ordering(8, batch_size=2)
        >>> for batch in torch.utils.data.DataLoader(range(8), batch_size=2, sampler=ordering.sampler):
        ...     ordering.observe(torch.randn(5))
        >>> ordering.epoch
        1
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized | int,
        *,
        batch_size: int,
        unit_size: int | None = None,
        lanes: int | None = None,
        order: str = "cd-grab",
        rule: str | RuleMaker = "greedy",
        world: World | None = None,
        seed: int = 0,
        drop_last: bool = False,
        block: int | None = None,
        group: Group = None,
        exchange: str | ExchangeMaker | None = None,
    ) -> None:
        settings = Settings.checked(
            dataset,
            batch_size=batch_size,
            unit_size=unit_size,
            lanes=lanes,
            order=order,
            rule=rule,
            world=world,
            seed=seed,
            drop_last=drop_last,
            block=block,
            group=group,
        )
        self._settings = settings
        self.seed, self.world = settings.seed, settings.world
        self.batch_size, self.unit_size = settings.batch_size, settings.unit_size
        self.order_name, self.drop_last = settings.order, settings.drop_last

        self._epoch = 0
        self._attachment: Attachment | None = None
        self._meter = Meter()
        self._lanes = settings.deal(0)
        self._config = settings.config(self._lanes)
        self._order_N: IntArray = np.arange(self._lanes.num_units, dtype=narrowest(self._lanes.num_units))
        self._progress = Progress(self._lanes, 0, self._order_N)
        settings.check_ranks(self._config, exchange)
        self._connection = Connection(settings, exchange)
        self._intake = Intake(settings, self._connection.exchange)
        self._intake.start_epoch(0, self._lanes)
        self.sampler = OrderedSampler(self, range(settings.num_examples))

    # What is visited

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0. It ends when its last row has been observed."""
        self._settle()
        return self._epoch

    @property
    def lanes(self) -> int:
        """The number of lanes, of all processes together."""
        return self._settings.lanes

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """For each lane of this process, the dataset indices of its units in this epoch's order."""
        self._settle()
        visited_Nu = self._lanes.units_Nu[self._order_N]
        num_lanes = self._lanes.num_local
        return tuple(_as_indices(visited_Nu[lane::num_lanes]) for lane in range(num_lanes))

    @property
    def order(self) -> Tensor:
        """Dataset indices of this process's units in this epoch's order."""
        self._settle()
        return _as_indices(self._lanes.units_Nu[self._order_N])

    @property
    def examples_per_epoch(self) -> int:
        """Examples this process visits in an epoch, padding included."""
        return self._lanes.num_samples

    @property
    def examples_left(self) -> int:
        """Examples of this epoch whose rows have not been observed."""
        self._settle()
        return self._progress.samples_left

    def remaining(self) -> IntArray:
        """Dataset indices this process has yet to visit in this epoch, in the order a loader should deliver them."""
        self._settle()
        return self._progress.remaining().astype(np.int64)

    # What is observed

    def observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        """Take the gradients of the next units. Once the whole epoch has been observed, the next order is in force.

        Args:
            rows: One row per unit, `units x dim`, or a single row. Any device, any floating type; nothing is kept by
                reference. A call takes the rows of a whole batch, as the loader delivers it. Several whole batches may
                come at once, `steps x units x dim`: signs are not due before the epoch ends, and short rows are
                balanced faster together. The scale of rows does not matter as long as it is the same for all of them.
            units: The dataset indices behind the rows, `unit_size` for each, if batches may arrive out of order.
                Without them the rows are those of the next units of the order. Name them always or never.
        """
        if self._attachment is not None:
            raise ValueError("gradients are observed by the model this ordering is attached to; call detach() first")
        self._expect(None)
        self._observe(rows, units)

    def _observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        with self._meter.timed():
            self._take(rows, units)
        self._end_epoch_if_due()

    def _take(self, rows: Tensor, units: Tensor | None) -> None:
        rows = torch.as_tensor(rows)
        rows_ND = self._intake.checked(rows)
        steps = len(rows) if rows.ndim == 3 else 1
        if units is None:
            units_due = steps * self._settings.units_per_batch
            step = self._progress.next_step(len(rows_ND) if self._sorter is not None else None, units_due)
        elif rows.ndim == 3:
            raise ValueError("rows of several steps are those of the next units; pass them without units=")
        else:
            examples = torch.as_tensor(units).reshape(-1).cpu().numpy()
            step = self._progress.named_step(len(rows_ND), examples)
        # All checks are done; from here on the step is recorded.
        self._progress.record(self._intake.take(rows_ND, step, self._lanes))

    def attach(
        self,
        model: nn.Module,
        *,
        source: str = "batch",
        reduction: str = "mean",
        length: int = DEFAULT_LENGTH,
        hook: Callable[..., Any] | None = None,
        hook_state: Any = None,
    ) -> None:
        """Observe the gradients of `model` from now on, at every backward pass; nothing else is to be called.

        Args:
            model: A `DistributedDataParallel` model, one to which `fully_shard` has been applied, or, in one process,
                any module.
            source: What a unit's gradient is. `"batch"`: what a backward pass leaves, so a unit is a batch, or several
                that are accumulated (`no_sync`). For single examples (`unit_size=1`): `"sketch"`, a short row for every
                example that keeps nearly all of the gain, or `"per_example"`, the whole gradient of every example:
                exact, and `examples x parameters` numbers for every batch.
            reduction: For single examples, what the loss does with the batch: `"mean"` or `"sum"`.
            length: How many numbers a sketch has, a power of two. Longer ones are closer to exact, and cost more.
            hook: A communication hook that is to average gradients instead of the all-reduce
                (`DistributedDataParallel` only); it must not have been registered.
            hook_state: The state of that hook.
        """
        if self._attachment is not None:
            raise ValueError("the ordering is attached to a model already; call detach() first")
        from cdgrab.sources.attach import attach  # pulls in DDP and FSDP, which not everyone needs

        self._attachment = attach(self, model, source, reduction, length, hook, hook_state)

    def explain(self, model: nn.Module, *inputs: Any, length: int = DEFAULT_LENGTH) -> str:
        """What `attach(model, source="sketch")` makes of a model: a table, layer by layer, with costs.

        Args:
            model: The model.
            inputs: Its arguments for some batch, so that costs can be told; a forward pass is made.
            length: Of the sketches.
        """
        from cdgrab.per_example.explain import explain

        return explain(model, length, inputs)

    def detach(self) -> None:
        """Stop observing. The model is left as it would be without ordering, and the ordering stays as it is."""
        if self._attachment is None:
            raise ValueError("the ordering is not attached to a model")
        self._settle()
        self._attachment.detach()
        self._attachment = None

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with what has been observed so far. Does nothing if `epoch` is the current one."""
        epoch = whole_number("epoch", epoch, least=0)
        self._settle()
        if epoch == self._epoch:
            return
        if self._sorter is not None and self._progress.rows == 0:
            log.warning(
                "epoch %d of order %r ends with no gradient observed, so its order stays; call ordering.observe() "
                "after every backward pass",
                self._epoch,
                self.order_name,
            )
        self._next_epoch(epoch)

    def metrics(self) -> dict[str, float]:
        """Figures of the last finished epoch, ready for a logger; empty before there is one.

        `imbalance` is the longest running sum of the epoch over `sqrt(sum ||row||^2)`: random signs give about 1, good
        balancing far less. It is that of whole gradients, also where sketches decide. `flipped` is the share of rows
        with a minus, `nonfinite` counts those left out (a row is a pair's difference, or with MeanBalance one
        gradient), `unobserved` units whose gradient never came. `seconds` is what this process spent on ordering,
        beside what averaging takes anyway; on a GPU, what it took to hand the work over. `bytes` is what this rank
        sent.
        """
        self._settle()
        return dict(self._meter.figures)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, at any step: plain numbers, strings and tensors, all copied."""
        self._settle()
        return {
            "version": checkpoint.VERSION,
            "config": self._config,
            "epoch": self._epoch,
            "payload": checkpoint.pack(
                {
                    **self._intake.state_dict(),
                    "order": torch.from_numpy(self._order_N),
                    "progress": self._progress.state_dict(),
                    "metrics": self._meter.figures,
                    "seconds": self._meter.seconds,
                }
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. A state that does not fit is refused and changes nothing."""
        self._settle()
        payload = checkpoint.unpack(
            state,
            self._config,
            self._lanes,
            form=self._intake.form,
            remembers=self._settings.remembers,
        )
        epoch = state["epoch"]
        lanes = self._settings.deal(epoch)
        order_N = payload["order"].numpy()
        progress = Progress(lanes, epoch, order_N)
        progress.load_state_dict(payload["progress"])
        intake = Intake(self._settings, self._connection.exchange, sketched=self._intake.sketched)
        intake.load_state_dict(payload, epoch, lanes)
        # Nothing can fail any more.
        self._epoch, self._lanes, self._order_N, self._progress, self._intake = epoch, lanes, order_N, progress, intake
        self._meter.figures, self._meter.seconds = payload["metrics"], payload["seconds"]

    # For attachments

    @property
    def _sorter(self) -> Sorter | None:
        """Where gradients go; None for orders without them."""
        return self._intake.sorter

    def _attached_sorter(self) -> Sorter | None:
        """Where the step under way goes."""
        if self._progress.finished:
            self._settle()
        return self._sorter

    def _count_step(self) -> CountedStep:
        """Record a step with one unit on each rank."""
        step = self._progress.next_step(None, self._settings.units_per_batch)
        counts_mL = self._lanes.counts(step.start, step.visits, self._settings.sorted_lanes)
        self._progress.record(step)
        counts_L = np.ones(self.lanes, dtype=bool) if counts_mL is None else counts_mL[0]
        return CountedStep(counts_L, self._progress.finished)

    def _observe_attached(self, row_D: Tensor | None) -> None:
        if row_D is None:
            self._count_step()
            self._end_epoch_if_due()
        else:
            self._observe(row_D)

    def _expect(self, sketched: Sketched | None) -> None:
        """Rows that come from now on are whole, or sketches. No collective is started.

        Within an epoch they stay what they are. Between epochs the draws of the rule go on.
        """
        if sketched == self._intake.sketched:
            return
        if self._progress.rows and self._sorter is not None:
            raise ValueError(
                f"{self._progress.rows} rows of this epoch have been observed already, as {self._intake.form}; go on "
                "with these, or begin another epoch with set_epoch()"
            )
        self._connection.use_for(sketched=sketched is not None)
        before = self._intake
        self._intake = Intake(self._settings, self._connection.exchange, sketched=sketched)
        self._intake.go_on_from(before)
        self._intake.start_epoch(self._epoch, self._lanes)

    def _examples_due(self) -> int:
        """How many examples the batch under way has, if units are single examples."""
        return self._progress.due(self._settings.units_per_batch)

    def _settle(self) -> None:
        """Wait for what an attached model has handed over. No collective is started: ranks may ask at any time."""
        if self._attachment is not None:
            self._attachment.settle()

    def _end_epoch_if_due(self) -> None:
        """To be called where all ranks come by: ending an epoch takes collectives."""
        if self._progress.finished:
            self._next_epoch(self._epoch + 1)

    def _next_epoch(self, epoch: int) -> None:
        """Close the epoch with what has been observed, and put the next order in force."""
        with self._meter.timed():
            tallies = self._arrange()
        if self._progress.rows:
            self._meter.finish(self._epoch, tallies, self._progress.num_unvisited, self._connection.exchange.bytes_sent)

        self._epoch, self._meter.seconds = epoch, 0.0
        spec = self._settings.spec
        if isinstance(spec, Free):
            if spec.redeal:
                self._lanes = self._settings.deal(epoch)
            self._order_N = self._baseline(spec, epoch)
        self._intake.start_epoch(epoch, self._lanes)
        # Last, because whoever sees an unfinished epoch may go on with it.
        self._progress = Progress(self._lanes, epoch, self._order_N)

    def _baseline(self, spec: Free, epoch: int) -> IntArray:
        """The order of an epoch that needs no gradients, lane by lane."""
        num_lanes, num_units = self._lanes.num_local, self._lanes.num_units
        planned = []
        for local, lane in enumerate(self._settings.local_lanes):
            units = np.arange(local, num_units, num_lanes, dtype=self._order_N.dtype)
            planned.append(units[spec.baseline(len(units), self.seed, epoch, lane)])
        return from_lanes(planned)

    def _arrange(self) -> list[Tally]:
        """Turn the signs of the epoch into an order, the same on all ranks; returns what balancing has counted."""
        sorter, settings = self._sorter, self._settings
        if sorter is None:
            return []
        sorter.close()
        tallies = sorter.tallies()
        mine = slice(None)
        if settings.coordinated:
            mine = slice(self.world.rank, None, self.world.size)
            if settings.ranks_meet:
                sorter.decisions.replace(self._connection.exchange.share(sorter.decisions.joined()))
                check_digest(self._epoch, sorter.decisions.digest(), self._connection.group)
        self._order_N = sorter.arrange(self._progress.by_visit(), mine)
        return tallies


def _as_indices(units: IntArray) -> Tensor:
    return torch.from_numpy(units.reshape(-1).astype(np.int64))

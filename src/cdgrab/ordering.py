"""`Ordering` joins the steps: order -> sampler -> loader -> rows -> exchange -> sorter -> next order."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from cdgrab import checkpoint
from cdgrab.agreement import check_digest, check_same
from cdgrab.arguments import checked_unit_size, length_of, split_batch, whole_number
from cdgrab.balance.rules import RuleMaker, find_rule
from cdgrab.exchange import (
    BoolArray,
    Exchange,
    ExchangeMaker,
    Local,
    Server,
    Sharded,
    ShardedPairs,
    find_exchange,
)
from cdgrab.exchange.collectives import own_group
from cdgrab.ghost.passes import Pass, Seen
from cdgrab.ghost.sorter import GhostPairs
from cdgrab.hooks import Attachment, Turn
from cdgrab.metrics import summarise
from cdgrab.order import Balanced, Free, Herded, find_order
from cdgrab.progress import Progress
from cdgrab.sampler import OrderedSampler
from cdgrab.sorter import RowSorter, SignSorter, make_sorter
from cdgrab.units import IntArray, Units, deal, generator
from cdgrab.world import Group, World, process_group

log = logging.getLogger("cdgrab")


class Ordering:
    """Finds, epoch by epoch, the order in which gradients balance out.

    Args:
        dataset: A map-style dataset, or its length.
        batch_size: The batch size of the loader. In a simulated world that is the batch of all workers together.
        unit_size: Examples per unit. By default a worker's whole batch is one unit, which is what a plain
            `backward()` gives a gradient of; 1 orders single examples and needs one row per example. Orders without
            gradients shuffle single examples by default.
        order: `"cd-grab"` or another name in `cdgrab.ORDERS`.
        rule: `"greedy"`, `"walk"`, `"halving"`, or a function that makes a rule from a random generator.
        world: Who takes part; by default what `torch.distributed` says.
        seed: Seed of the first order and of everything random.
        drop_last: Leave out of every epoch what does not fill a batch on every worker. Units that were left out come
            in the middle of the next epoch; examples that fill no unit (fewer than `unit_size` on each worker, none
            if it is 1) are never visited. Without it the last batch is short, and workers with one example less
            repeat one, as with `DistributedSampler`.
        group: The ranks among which data are dealt: a process group or a dimension of a device mesh; by default all.
        exchange: How ranks bring their rows together: `"sharded"` (default for `cd-grab`; the price of an all-reduce),
            `"gather"` (default for the other coordinated orders), `"server"`, `"sketch"`, or a function that makes
            one from a process group.
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
        order: str = "cd-grab",
        rule: str | RuleMaker = "greedy",
        world: World | None = None,
        seed: int = 0,
        drop_last: bool = False,
        block: int | None = None,
        group: Group = None,
        exchange: str | ExchangeMaker | None = None,
    ) -> None:
        length = length_of(dataset)
        self.seed = whole_number("seed", seed, least=0)
        self._group = process_group(group)
        self.world = world or World.detect(self._group)
        self.batch_size = whole_number("batch_size", batch_size, least=1)
        self.order_name = order
        self.drop_last = drop_last
        self._spec = find_order(order)
        self._worker_batch = split_batch(self.batch_size, self.world)
        self.unit_size = checked_unit_size(unit_size, 1 if isinstance(self._spec, Free) else None, self._worker_batch)
        self._make_rule = find_rule(rule)
        self._rule_name = rule if isinstance(rule, str) else "custom"
        self._block = None if block is None else whole_number("block", block, least=1)
        self._check_world()

        self._epoch = 0
        self._attachment: Attachment | None = None
        self._records = False  # whether rows come as records
        self._dim: int | None = None
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._last_metrics: dict[str, float] = {}
        self._seconds = 0.0
        self._bytes_before = 0
        self._units = self._deal(length)
        self._config = self._make_config()
        self._orders = [np.arange(self._units.num_units(worker)) for worker in self.world.local_workers]
        self._progress = Progress(self._units, 0, self._orders)
        if self._ranks_meet:
            same = {key: value for key, value in self._config.items() if key != "rank"}
            check_same("the ordering", {**same, "exchange": "custom" if callable(exchange) else exchange}, self._group)
        self._exchange = self._make_exchange(exchange)
        self._sorter = self._new_sorter()
        if self._sorter is not None:
            self._sorter.start_epoch(0, self._visits())
        self.sampler = OrderedSampler(self, range(length))

    # What is visited

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0. It ends when its last row has been observed."""
        self._settle()
        return self._epoch

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """For each worker of this process, the dataset indices of its units in this epoch's order."""
        self._settle()
        return tuple(
            torch.from_numpy(self._units.group(local)[order].reshape(-1)) for local, order in enumerate(self._orders)
        )

    @property
    def order(self) -> Tensor:
        """Dataset indices of this process's units in this epoch's order; simulated workers one after the other."""
        return torch.cat(self.orders)

    @property
    def examples_per_epoch(self) -> int:
        """Examples this process visits in an epoch, padding included."""
        return self._units.num_samples * len(self.world.local_workers)

    @property
    def examples_left(self) -> int:
        """Examples of this epoch whose rows have not been observed."""
        self._settle()
        return self._progress.samples_left * len(self.world.local_workers)

    def remaining(self) -> IntArray:
        """Dataset indices this process has yet to visit in this epoch, in the order a loader should deliver them."""
        self._settle()
        return self._progress.stream(self._worker_batch)

    # What is observed

    def observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        """Take the gradients of the next units. Once the whole epoch has been observed, the next order is in force.

        Args:
            rows: One row per unit, `units x dim`, or a single row. Any device, any floating type; nothing is kept by
                reference. In a simulated world a call takes a whole step: all rows of worker 0, then of worker 1,
                and so on, as the loader delivers them. Several whole steps may come at once, `steps x units x dim`:
                signs are not due before the epoch ends, and short rows are balanced faster together. The scale of
                rows does not matter as long as it is the same for all of them.
            units: The dataset indices behind the rows, `unit_size` for each, if batches may arrive out of order.
                Without them the rows are those of the next units of the order. Name them always or never.
        """
        if self._attachment is not None:
            raise ValueError("gradients are observed by the model this ordering is attached to; call detach() first")
        self._observe(rows, units)

    def _observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        with self._timed():
            self._take(rows, units)
        self._end_epoch_if_due()

    def _take(self, rows: Tensor, units: Tensor | None) -> None:
        rows = torch.as_tensor(rows)
        steps = len(rows) if rows.ndim == 3 else 1
        if steps == 0:
            raise ValueError(f"rows have the shape {tuple(rows.shape)}, which is no step; give at least one")
        rows_ND = self._check_rows(rows.flatten(0, 1) if rows.ndim == 3 else rows)
        if units is None:
            turns = steps * self._turns_per_batch
            step = self._progress.next_step(len(rows_ND) if self._sorter is not None else None, turns)
        elif rows.ndim == 3:
            raise ValueError("rows of several steps are those of the next units; pass them without units=")
        else:
            examples = torch.as_tensor(units).reshape(-1).cpu().numpy()
            step = self._progress.named_step(len(rows_ND), examples)
        # All checks are done; from here on the step is recorded.
        self._dim, self._dtype = rows_ND.shape[1], rows_ND.dtype
        if self._sorter is not None:
            # Worker by worker within a step, turn by turn over all of them.
            rows_SLtD = rows_ND.view(steps, len(self.world.local_workers), -1, rows_ND.shape[1])
            rows_mLD = rows_SLtD.transpose(1, 2)
            if step.counts_Lm is not None or not isinstance(self._sorter, SignSorter) or not self.world.one_process:
                rows_mLD = rows_mLD.flatten(0, 1)
            self._sort(rows_mLD, None if step.counts_Lm is None else step.counts_Lm.T)
        self._progress.record(step)

    def attach(
        self,
        model: nn.Module,
        *,
        source: str = "batch",
        reduction: str = "mean",
        length: int = 1024,
        fitted: bool = True,
        hook: Callable[..., Any] | None = None,
        hook_state: Any = None,
    ) -> None:
        """Observe the gradients of `model` from now on, at every backward pass; nothing else is to be called.

        Args:
            model: A `DistributedDataParallel` model, one to which `fully_shard` has been applied, or, in one process,
                any module.
            source: What a unit's gradient is. `"batch"`: what a backward pass leaves, so a unit is a batch, or several
                that are accumulated (`no_sync`). `"ghost"`: the gradient of every single example (`unit_size=1`),
                from what the layers of the model have seen, exactly, and written down only where that is cheaper; one
                process, with any number of simulated workers. `"per_example"`: the same, written down as rows, for any
                number of ranks and any exchange. `"sketch"`: a short row for every example, made from projections;
                cheap to find and to send, and not exact.
            reduction: For single examples, what the loss does with the batch: `"mean"` or `"sum"`.
            length: Of a sketch: about how many numbers a row has.
            fitted: Whether the projections of a sketch follow the data, or are random.
            hook: A communication hook that is to average gradients instead of the all-reduce
                (`DistributedDataParallel` only); it must not have been registered.
            hook_state: The state of that hook.
        """
        if self._attachment is not None:
            raise ValueError("the ordering is attached to a model already; call detach() first")
        from cdgrab.hooks.attach import attach  # pulls in DDP and FSDP, which not everyone needs

        self._attachment = attach(self, model, source, reduction, length, fitted, hook, hook_state)

    def explain(self, model: nn.Module, *inputs: Any) -> str:
        """How `attach(model, source="ghost")` would find gradients of single examples: a table, layer by layer.

        Args:
            model: The model.
            inputs: Its arguments for some batch, so that costs can be told; a forward pass is made.
        """
        from cdgrab.ghost.plan import explain

        return explain(model, self.batch_size, inputs)

    def detach(self) -> None:
        """Stop observing. The model is left as it would be without ordering."""
        if self._attachment is None:
            raise ValueError("the ordering is not attached to a model")
        self._settle()
        if self._records and self._progress.turns:
            raise ValueError(
                f"{self._progress.turns} turns of this epoch have been observed as records, which nothing else can "
                "continue; detach between epochs, or call set_epoch() first"
            )
        self._attachment.detach()
        self._attachment = None
        self._balance_records(False)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with what has been observed so far. Does nothing if `epoch` is the current one."""
        epoch = whole_number("epoch", epoch, least=0)
        self._settle()
        if epoch == self._epoch:
            return
        if self._sorter is not None and self._progress.turns == 0:
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
        balancing far less. `flipped` is the share of rows with a minus, `nonfinite` counts those left out
        (a row is a pair's difference, or with MeanBalance one gradient),
        `unobserved` units whose gradient never came. `seconds` is what this process spent on ordering, beside what
        averaging takes anyway; on a GPU, what it took to hand the work over. `bytes` is what this rank sent.
        """
        self._settle()
        return dict(self._last_metrics)

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
                    "records": self._records,
                    "sketch": None if self._sketcher is None else self._sketcher.state_dict(),
                    "dim": self._dim,
                    "dtype": None if self._dtype is None else str(self._dtype).removeprefix("torch."),
                    "orders": [torch.from_numpy(order) for order in self._orders],
                    "progress": self._progress.state_dict(),
                    "sorter": {} if self._sorter is None else self._sorter.state_dict(),
                    "metrics": self._last_metrics,
                    "seconds": self._seconds,
                }
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. A state that does not fit is refused and changes nothing."""
        self._settle()
        payload = checkpoint.unpack(state, self._config, [len(order) for order in self._orders])
        # Between epochs nothing is left of either form.
        moved = (
            payload["records"] != self._records and payload["progress"]["turns"] == 0 and self._rule_name == "greedy"
        )
        if payload["records"] != self._records and not moved:
            kinds = {True: "as records of layers (source='ghost')", False: "as rows"}
            raise ValueError(
                f"the state was taken within an epoch with gradients {kinds[payload['records']]}, and this ordering "
                f"has them {kinds[self._records]}; attach the model before loading, as it was, or load a state taken "
                "between epochs"
            )
        units = self._deal(self._units.num_examples, state["epoch"])
        orders = [order.numpy() for order in payload["orders"]]
        progress = Progress(units, state["epoch"], orders)
        progress.load_state_dict(payload["progress"])
        sorter = self._new_sorter()
        if sorter is not None and moved:
            sorter.start_epoch(state["epoch"], self._visits())
        elif sorter is not None:
            sorter.load_state_dict(payload["sorter"])
        if (payload["sketch"] is None) != (self._sketcher is None):
            kinds = {True: "without", False: "with a model attached by source='sketch'"}
            raise ValueError(
                f"the state was taken {kinds[payload['sketch'] is None]}, and this ordering is "
                f"{kinds[self._sketcher is None]}; attach the model before loading"
            )
        if self._sketcher is not None:
            self._sketcher.load_state_dict(payload["sketch"])
        # Nothing can fail any more.
        self._units, self._orders, self._progress, self._sorter = units, orders, progress, sorter
        self._epoch, self._dim, self._device = state["epoch"], payload["dim"], None
        self._dtype = None if payload["dtype"] is None else getattr(torch, payload["dtype"])
        self._last_metrics, self._seconds = payload["metrics"], payload["seconds"]

    # For attachments

    @property
    def _sketcher(self) -> Any:
        """What has a state: of whole rows nothing has to be known."""
        sketcher = getattr(self._attachment, "sketcher", None)
        return None if sketcher is None or sketcher.whole else sketcher

    def _attached_sorter(self) -> RowSorter | ShardedPairs | GhostPairs | None:
        """Where the turn under way goes."""
        if self._progress.finished:
            self._settle()
        return self._sorter

    def _count_turn(self) -> Turn:
        """Record a turn of every worker."""
        turn = self._progress.turns
        workers = range(self.world.size) if self._coordinated else self.world.local_workers
        self._progress.record(self._progress.next_step(None, self._turns_per_batch))
        counts_W = np.array([turn < self._units.num_visited(worker) for worker in workers])
        return Turn(counts_W, self._progress.finished)

    def _observe_attached(self, row_D: Tensor | None) -> None:
        if row_D is None:
            self._count_turn()
            self._end_epoch_if_due()
        else:
            self._observe(row_D)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """What is done in here counts as time spent on ordering; what is refused leaves no trace."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def _check_records(self) -> None:
        """Whether rows can come as records."""
        if self._sorter is None:
            return
        alone = isinstance(self._spec, Balanced) and not self._spec.coordinated and self.world.size > 1
        if not isinstance(self._spec, Balanced) or self._spec.centring != "pair" or alone:
            raise ValueError(
                f"source 'ghost' balances pairs against one running sum, which order {self.order_name!r} does not; use "
                "order 'cd-grab', or source 'per_example'"
            )
        if not self.world.one_process and self.world.size > 1:
            raise ValueError(
                f"source 'ghost' needs all workers in one process, and there are {self.world.size} ranks; use source "
                "'per_example'"
            )
        if self._progress.turns:
            raise ValueError(
                f"{self._progress.turns} turns of this epoch have been observed already; attach the model before the "
                "first batch of an epoch"
            )

    def _balance_records(self, wanted: bool) -> None:
        """Rows come as records from now on, or no longer."""
        if self._sorter is not None and wanted != self._records:
            self._records = wanted
            self._sorter = self._new_sorter()
            assert self._sorter is not None
            self._sorter.start_epoch(self._epoch, self._visits())

    def _examples_due(self) -> int:
        """How many examples the batch under way has, if units are single examples."""
        held = getattr(self._attachment, "held", None)
        done = self._progress.turns + (0 if held is None else held.steps * self._turns_per_batch)
        return min(self._turns_per_batch, self._units.num_slots - done) * len(self.world.local_workers)

    @property
    def _batches_left(self) -> int:
        """Of this epoch, with all that have been handed over and are not observed yet."""
        return -((self._progress.turns - self._units.num_slots) // self._turns_per_batch)

    def _steps_together(self, rows_ND: Tensor) -> int:
        """Of how many steps rows like these had better come together."""
        alone = self.world.one_process or self.world.size == 1
        if not (rows_ND.is_cuda and alone and isinstance(self._sorter, SignSorter)):
            return 1
        return self._sorter.turns_together(rows_ND) // self._turns_per_batch

    @property
    def _pairs_are_steps(self) -> bool:
        """Whether what is done with the pairs of two steps is always the same."""
        return self._turns_per_batch == 1 and self._rule_name == "greedy"

    @property
    def _looks_later(self) -> bool:
        """Whether turns had better come with what layers saw, and not with records."""
        return self._pairs_are_steps and isinstance(self._sorter, GhostPairs) and self._sorter.looks_later

    def _keep_seen(self, seen: list[Seen], start: int) -> list[Seen]:
        """Copies of layers of the pass under way, if records will be made of copies."""
        return self._sorter.keep(seen, start) if isinstance(self._sorter, GhostPairs) and seen else seen

    def _observe_records(self, turn: Pass, shapes: dict[str, torch.Size]) -> None:
        with self._timed():
            step = self._progress.next_step(None, self._turns_per_batch)  # layers have been counted
            if isinstance(self._sorter, GhostPairs):
                self._sorter.add(turn, shapes, step.turns, None if step.counts_Lm is None else step.counts_Lm.T)
            self._progress.record(step)
        self._end_epoch_if_due()

    def _settle(self) -> None:
        """Wait for what an attached model has handed over. No collective is started: ranks may ask at any time."""
        if self._attachment is not None:
            self._attachment.settle()

    def _end_epoch_if_due(self) -> None:
        """To be called where all ranks come by: ending an epoch takes collectives."""
        if self._progress.finished:
            self._next_epoch(self._epoch + 1)

    @property
    def _coordinated(self) -> bool:
        return isinstance(self._spec, Herded) or (isinstance(self._spec, Balanced) and self._spec.coordinated)

    @property
    def _ranks_meet(self) -> bool:
        """Whether there are other ranks to talk to. A world made by hand, for tests and studies, has none."""
        return not self.world.one_process and self.world.size > 1 and dist.is_available() and dist.is_initialized()

    def _check_world(self) -> None:
        if self._ranks_meet:
            rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
            if (rank, size) != (self.world.rank, self.world.size):
                raise ValueError(
                    f"world says rank {self.world.rank} of {self.world.size}, the process group rank {rank} of {size}; "
                    "pass group= and leave world= out"
                )

    def _make_exchange(self, exchange: str | ExchangeMaker | None) -> Exchange:
        pairs = isinstance(self._spec, Balanced) and self._spec.centring == "pair"
        maker = find_exchange(exchange or ("sharded" if pairs else "gather"))
        if maker is Sharded and self._coordinated and not pairs:
            raise ValueError(
                f"exchange 'sharded' balances pair differences, which order {self.order_name!r} does not; use 'gather'"
            )
        if maker is Server and isinstance(self._spec, Herded):
            raise ValueError("exchange 'server' sends signs, of which order 'greedy-herding' knows none; use 'gather'")
        if not (self._coordinated and self._ranks_meet):
            return Local()
        self._group = own_group(self._group)
        return maker(self._group)

    def _make_config(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        return {
            "num_examples": self._units.num_examples,
            "batch_size": self.batch_size,
            "unit_size": self.unit_size,
            "order": self.order_name,
            "rule": self._rule_name,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "world_size": self.world.size,
            "rank": self.world.rank,
            "simulated": self.world.one_process,
            "dealt": zlib.crc32(self._units.dealt.tobytes()),
        }

    def _deal(self, length: int, epoch: int = 0) -> Units:
        return deal(
            length,
            self.world,
            unit_size=self.unit_size,
            seed=self.seed,
            epoch=epoch if isinstance(self._spec, Free) and self._spec.redeal else 0,
            whole_batches=self._worker_batch if self.drop_last else None,
            shuffle=self._spec.shuffle if isinstance(self._spec, Free) else True,
        )

    def _new_sorter(self) -> RowSorter | ShardedPairs | GhostPairs | None:
        if isinstance(self._spec, Free):
            return None
        workers = self.world.size if self._coordinated else len(self.world.local_workers)
        # Ranks that balance alone sort one worker each; their draws must differ all the same.
        first = 0 if self._coordinated else self.world.local_workers[0]
        rngs = [generator(self.seed, first + worker, "rule") for worker in range(workers)]
        if self._records:
            return GhostPairs(workers, self._make_rule(rngs[0]))
        if isinstance(self._exchange, Sharded):
            return ShardedPairs(workers, self._exchange, self._make_rule(rngs[0]))
        return make_sorter(self._spec, rngs, self._make_rule, self._block)

    def _visits(self) -> IntArray:
        workers = range(self.world.size) if self._coordinated else self.world.local_workers
        return np.array([self._units.num_visited(worker) for worker in workers])

    def _check_rows(self, rows: Tensor) -> Tensor:
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
        return rows.to(self._settle_on(rows.device), dtype)

    def _settle_on(self, device: torch.device) -> torch.device:
        """Rows stay on the device of the first of them; a loaded state, which is on the CPU, follows."""
        if self._device is None:
            self._device = device
            if self._dim is not None and self._sorter is not None and device.type != "cpu":
                sorter = self._new_sorter()
                assert sorter is not None
                sorter.load_state_dict(tree_map_only(Tensor, lambda part: part.to(device), self._sorter.state_dict()))
                self._sorter = sorter
        return self._device

    @property
    def _turns_per_batch(self) -> int:
        return max(1, self._worker_batch // self.unit_size)

    def _sort(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> None:
        assert self._sorter is not None
        assert not isinstance(self._sorter, GhostPairs)
        if (
            self._coordinated
            and self.world.size > 1
            and isinstance(self._exchange, Local)
            and not self.world.one_process
        ):
            raise ValueError(
                f"order {self.order_name!r} coordinates {self.world.size} ranks, but torch.distributed is not "
                "initialised; call init_process_group() before making the ordering, or use World.simulated()"
            )
        rows_mWD, counts_mW = self._exchange.collect(rows_mLD, counts_mL)
        if rows_mWD is None:
            return
        if isinstance(self._sorter, ShardedPairs):
            assert counts_mW is not None
            for slices_Wc, counts_W in zip(rows_mWD, counts_mW, strict=True):
                self._sorter.add_turn(slices_Wc, counts_W)
        else:
            # Padding comes last: whole turns first, all at once, then row by row.
            whole = len(rows_mWD) if counts_mW is None else int(counts_mW.all(1).cumprod().sum())
            if whole:
                self._sorter.add(rows_mWD[:whole])
            for turn, worker in [] if counts_mW is None else np.argwhere(counts_mW[whole:]):
                self._sorter.add_one(rows_mWD[whole + turn, worker], worker)

    def _next_epoch(self, epoch: int) -> None:
        """Close the epoch with what has been observed, and put the next order in force."""
        start = time.perf_counter()
        unvisited = [self._progress.unvisited(local) for local in range(len(self._orders))]
        tallies = []
        if self._sorter is not None:
            self._sorter.close()
            tallies = self._sorter.tallies()
            if self._coordinated and self._ranks_meet:
                self._sorter.decisions.replace(self._exchange.share(self._sorter.decisions.joined()))
                check_digest(self._epoch, self._sorter.decisions.digest(), self._group)
            for local, worker in enumerate(self.world.local_workers):
                index = worker if self._coordinated else local
                visited = self._progress.visited(local)
                self._orders[local] = self._sorter.arrange(index, visited, unvisited[local])
        if self._progress.turns:
            self._last_metrics = summarise(
                self._epoch,
                tallies,
                unobserved=sum(map(len, unvisited)),
                seconds=self._seconds + time.perf_counter() - start,
                bytes_sent=self._exchange.bytes_sent - self._bytes_before,
            )
            self._bytes_before = self._exchange.bytes_sent
            left_out = self._last_metrics["nonfinite"]
            if left_out:
                log.warning(
                    "epoch %d: %d gradients or pairs of them were not finite; they were left out and their units kept "
                    "their order",
                    self._epoch,
                    left_out,
                )

        self._epoch, self._seconds = epoch, 0.0
        if isinstance(self._spec, Free):
            if self._spec.redeal:
                self._units = self._deal(self._units.num_examples, epoch)
            baseline = self._spec.baseline
            self._orders = [
                baseline(self._units.num_units(worker), self.seed, epoch, worker) for worker in self.world.local_workers
            ]
        if self._sorter is not None:
            self._sorter.start_epoch(epoch, self._visits())
        # Last, because whoever sees an unfinished epoch may go on with it.
        self._progress = Progress(self._units, epoch, self._orders)

"""`Ordering`, the class users hold. What changes from step to step is in `epochs.py`."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cdgrab.arguments import whole_number
from cdgrab.balancing.rules import RuleMaker
from cdgrab.epochs import Epochs
from cdgrab.exchange import ExchangeMaker
from cdgrab.exchange.connection import Connection
from cdgrab.lanes import IntArray
from cdgrab.per_example.explain import explain
from cdgrab.per_example.sketch import DEFAULT_LENGTH
from cdgrab.sampler import OrderedSampler
from cdgrab.settings import Settings
from cdgrab.sources import Attachment, GradientSource, find_source
from cdgrab.state import VERSION, pack, unpack
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
        self._attachment: Attachment | None = None
        lanes_dealt = settings.deal(0)
        self._config = settings.config(lanes_dealt)
        settings.check_ranks(self._config, exchange)
        self._epochs = Epochs(settings, Connection(settings, exchange), lanes_dealt)
        if lanes_dealt.num_units < 2 * lanes_dealt.num_local:
            log.warning(
                "there is nothing to order: %d examples make %d units of %d for %d lanes of this process, and a lane "
                "needs two; use a smaller unit_size or batch_size",
                settings.num_examples,
                lanes_dealt.num_units,
                settings.unit_size,
                lanes_dealt.num_local,
            )
        self.sampler = OrderedSampler(self, settings, range(settings.num_examples))

    # What was asked for

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return self._settings.seed

    @property
    def world(self) -> World:
        """Rank and number of processes."""
        return self._settings.world

    @property
    def batch_size(self) -> int:
        """Examples of this process in a full batch."""
        return self._settings.batch_size

    @property
    def unit_size(self) -> int:
        """Examples in a unit."""
        return self._settings.unit_size

    @property
    def lanes(self) -> int:
        """The number of lanes, of all processes together."""
        return self._settings.lanes

    @property
    def order_name(self) -> str:
        """The name of the order in `cdgrab.ORDERS`."""
        return self._settings.order

    @property
    def drop_last(self) -> bool:
        """Whether every epoch leaves out what does not fill a batch."""
        return self._settings.drop_last

    # What is visited

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0. It ends when its last row has been observed."""
        return self._settled().epoch

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """For each lane of this process, the dataset indices of its units in this epoch's order."""
        epochs = self._settled()
        visited_Nu = epochs.lanes.units_Nu[epochs.order_N]
        num_lanes = epochs.lanes.num_local
        return tuple(_as_indices(visited_Nu[lane::num_lanes]) for lane in range(num_lanes))

    @property
    def order(self) -> Tensor:
        """Dataset indices of this process's units in this epoch's order."""
        epochs = self._settled()
        return _as_indices(epochs.lanes.units_Nu[epochs.order_N])

    @property
    def examples_per_epoch(self) -> int:
        """Examples this process visits in an epoch, padding included."""
        return self._epochs.lanes.num_samples

    @property
    def examples_left(self) -> int:
        """Examples of this epoch whose rows have not been observed."""
        return self._settled().progress.samples_left

    def remaining(self) -> IntArray:
        """Dataset indices this process has yet to visit in this epoch, in the order a loader should deliver them."""
        return self._settled().progress.remaining().astype(np.int64)

    # What is observed

    def observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        """Take the gradients of the next units. Once the whole epoch has been observed, the next order is in force.

        Args:
            rows: One row per unit, `units x dim`, or a single row. Any device, any floating type; nothing is kept by
                reference. A call takes the rows of a whole batch, as the loader delivers it. Several whole batches may
                come at once, `steps x units x dim`: signs are not due before the epoch ends, and short rows are
                balanced faster together. The scale of rows does not matter as long as it is the same for all of them,
                and their squared lengths are numbers of their type (in single precision from 1e-38 to 1e38).
            units: The dataset indices behind the rows, `unit_size` for each, if batches may arrive out of order.
                Without them the rows are those of the next units of the order. Name them always or never.
        """
        if self._attachment is not None:
            raise ValueError("gradients are observed by the model this ordering is attached to; call detach() first")
        self._epochs.expect(None)
        self._epochs.observe(rows, units)

    def attach(self, model: nn.Module, *, source: str | GradientSource = "batch", **options: Any) -> None:
        """Observe the gradients of `model` from now on, at every backward pass; nothing else is to be called.

        Args:
            model: A `DistributedDataParallel` model, one to which `fully_shard` has been applied, or, in one process,
                any module.
            source: What a unit's gradient is. `"batch"`: what a backward pass leaves, so a unit is a batch, or several
                that are accumulated (`no_sync`). For single examples (`unit_size=1`): `"sketch"`, a short row for every
                example that keeps nearly all of the gain, or `"per_example"`, the whole gradient of every example:
                exact, and `examples x parameters` numbers for every batch. A `cdgrab.sources.GradientSource` of your
                own serves as well.
            options: Of the source; one that it does not have is an error. `"batch"` takes `hook` and `hook_state`, a
                communication hook that averages gradients instead of the all-reduce (`DistributedDataParallel` only).
                `"sketch"` and `"per_example"` take `reduction`, what the loss does with the batch: `"mean"` (default)
                or `"sum"`, and `strict`: whether a parameter whose gradients of single examples cannot be seen is an
                error. By default it is left out, with a warning. `"sketch"` takes `length`, how many numbers a sketch
                has: a power of two, by default 1,024.
        """
        if self._attachment is not None:
            raise ValueError("the ordering is attached to a model already; call detach() first")
        self._settings.check_world_is_the_same()
        self._attachment = find_source(source, options).attach(self._epochs, model)

    def explain(self, model: nn.Module, *inputs: Any, length: int = DEFAULT_LENGTH) -> str:
        """What `attach(model, source="sketch")` makes of a model: a table, layer by layer, with costs.

        Args:
            model: The model.
            inputs: Its arguments for some batch, so that costs can be told; a forward pass is made.
            length: Of the sketches.
        """
        return explain(model, length, inputs)

    def detach(self) -> None:
        """Stop observing. The model is left as it would be without ordering, and the ordering stays as it is."""
        if self._attachment is None:
            raise ValueError("the ordering is not attached to a model")
        self._settled()
        self._attachment.detach()
        self._attachment = None

    def close(self) -> None:
        """Detach the model, and give back the process group that ordering made for itself.

        Nobody has to call this: a process may end, or destroy its groups, without it. All ranks should, or none.
        """
        if self._attachment is not None:
            self.detach()
        self._epochs.close()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with what has been observed so far. Does nothing if `epoch` is the current one."""
        epoch = whole_number("epoch", epoch, least=0)
        epochs = self._settled()
        if epoch == epochs.epoch:
            return
        if epochs.balances and epochs.progress.rows == 0:
            log.warning(
                "epoch %d of order %r ends with no gradient observed, so its order stays; call ordering.observe() "
                "after every backward pass",
                epochs.epoch,
                self.order_name,
            )
        epochs.next_epoch(epoch)

    def metrics(self) -> dict[str, float]:
        """Figures of the last finished epoch, ready for a logger. Before there is one, `epoch` is -1.

        `imbalance` is the longest running sum of the epoch over `sqrt(sum ||row||^2)`: random signs give about 1, good
        balancing far less. It is that of whole gradients, also where sketches decide. `flipped` is the share of rows
        with a minus, `nonfinite` counts those left out (a row is a pair's difference, or with MeanBalance one
        gradient), `unobserved` units whose gradient never came. `seconds` is what this process spent on ordering,
        beside what averaging takes anyway; on a GPU, what it took to hand the work over. `bytes` is what this rank
        sent. `balanced` is the share of the trained numbers that takes part.
        """
        return dict(self._settled().meter.figures)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, at any step: plain numbers, strings and tensors, all copied."""
        epochs = self._settled()
        return {
            "version": VERSION,
            "config": self._config,
            "epoch": epochs.epoch,
            "payload": pack(epochs.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. A state that does not fit is refused and changes nothing."""
        epochs = self._settled()
        payload = unpack(state, self._config, epochs.lanes, form=epochs.intake.form, remembers=self._settings.remembers)
        epochs.load_state_dict(state["epoch"], payload)

    def _settled(self) -> Epochs:
        """The epochs, once what an attached model has handed over has been dealt with.

        No collective is started: ranks may ask at any time.
        """
        if self._attachment is not None:
            self._attachment.settle()
        return self._epochs


def _as_indices(units: IntArray) -> Tensor:
    return torch.from_numpy(units.reshape(-1).astype(np.int64))

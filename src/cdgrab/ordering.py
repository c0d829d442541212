"""`Ordering`, the class that users hold. `epochs.py` holds what changes from step to step."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cdgrab.arguments import Fingerprint, whole_number
from cdgrab.balancing.rules import RuleMaker
from cdgrab.elastic import LAYOUT, Saved
from cdgrab.epochs import Epochs
from cdgrab.exchange import ExchangeMaker
from cdgrab.exchange.connection import Connection
from cdgrab.lanes import IntArray
from cdgrab.per_example.explain import explain
from cdgrab.per_example.sketch import DEFAULT_LENGTH
from cdgrab.sampler import OrderedSampler
from cdgrab.settings import Settings
from cdgrab.sources import Attachment, GradientSource, find_source
from cdgrab.state import check_config, pack, unpack
from cdgrab.world import Group, World

log = logging.getLogger("cdgrab")


class Ordering:
    """Finds, epoch by epoch, the order in which gradients balance out.

    Args:
        dataset: A map-style dataset, or its length.
        batch_size: The batch size of the loader, on each rank.
        unit_size: Examples per unit. By default 1: single examples are ordered, which gains most. `batch_size` orders
            whole batches, `4 * batch_size` what is accumulated over four of them.
        lanes: The number of sequences of units, each reordered on its own and in step with the others: the paper's
            workers. By default one for every unit of the global batch (all ranks' batches together). Rank `k` of `W`
            has the lanes `l` with `l mod W == k`.
        order: `"cd-grab"` or another name in `cdgrab.ORDERS`.
        rule: `"greedy"`, `"walk"`, `"halving"`, or a function that makes a rule from a random generator.
        world: Rank and number of processes; by default those of `torch.distributed`.
        seed: Seed of the first order and of everything random.
        drop_last: Leave examples that do not fill a batch on every rank out of every epoch. Their units come in the
            middle of the next epoch. Examples that fill no unit (fewer than `unit_size` on each rank, none if it is 1)
            are never visited. Without it the last batch is short, and ranks with one example less repeat one, as with
            `DistributedSampler`.
        group: The ranks among which data are dealt: a process group or a dimension of a device mesh; by default all.
        exchange: How ranks bring their rows together: `"sharded"` (default for `cd-grab`; the price of an all-reduce),
            `"gather"` (default for the other coordinated orders), `"server"`, or a function that makes one from a
            process group.
        fingerprint: A string that tells this dataset from others, or a function that makes one of the dataset: a hash
            that it has, its first and last examples. Ranks compare theirs, and a saved state fits only the same one.
        block: Rows to buffer before signs are decided; by default it adapts to their length. It changes cost, not
            results.

    Example:
        >>> ordering = Ordering(8, batch_size=2)
        >>> for batch in torch.utils.data.DataLoader(range(8), batch_size=2, sampler=ordering.sampler):
        ...     ordering.observe(torch.randn(2, 5))
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
        fingerprint: Fingerprint = None,
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
            fingerprint=fingerprint,
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
        self.sampler = OrderedSampler(self, settings, range(settings.num_examples), self._epochs.deliveries)

    # What was asked for

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return self._settings.seed

    @property
    def world(self) -> World:
        """The rank of this process and the number of processes."""
        return self._settings.world

    @property
    def batch_size(self) -> int:
        """The number of examples of this process in a full batch."""
        return self._settings.batch_size

    @property
    def unit_size(self) -> int:
        """The number of examples in a unit."""
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
        """Whether every epoch leaves out examples that do not fill a batch."""
        return self._settings.drop_last

    # What is visited

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0. It ends when its last row has been observed."""
        return self._settled().epoch

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """The dataset indices of the units in this epoch's order, for each lane of this process."""
        epochs = self._asked()
        visited_Nu = epochs.lanes.units_Nu[epochs.order_N]
        num_lanes = epochs.lanes.num_local
        return tuple(_as_indices(visited_Nu[lane::num_lanes]) for lane in range(num_lanes))

    @property
    def order(self) -> Tensor:
        """The dataset indices of this process's units in this epoch's order."""
        epochs = self._asked()
        return _as_indices(epochs.lanes.units_Nu[epochs.order_N])

    @property
    def examples_per_epoch(self) -> int:
        """The number of examples this process visits in an epoch, padding included."""
        return self._epochs.lanes.num_samples

    @property
    def examples_left(self) -> int:
        """The number of examples of this epoch whose rows have not been observed."""
        return self._settled().progress.samples_left

    def remaining(self) -> IntArray:
        """The dataset indices this process has yet to visit in this epoch, in the order for a loader."""
        return self._asked().progress.remaining().astype(np.int64)

    def examples_of(self, step: int) -> IntArray:
        """The dataset indices of this process's batch at a step of this epoch, visited already or not.

        Args:
            step: Counted over all epochs from 0; an epoch has as many steps as its loader has batches.
        """
        epochs, size = self._asked(), self.batch_size
        per_epoch = -(-self.examples_per_epoch // size)
        first = epochs.epoch * per_epoch
        if not first <= whole_number("step", step, least=0) < first + per_epoch:
            raise ValueError(
                f"step {step} is in epoch {step // per_epoch}, and this is epoch {epochs.epoch}, with steps {first} to "
                f"{first + per_epoch - 1}; load a state of that epoch"
            )
        return epochs.progress.planned()[(step - first) * size :][:size].astype(np.int64)

    # What is observed

    def observe(self, rows: Tensor, units: Tensor | None = None) -> None:
        """Take the gradients of the next units. The last row of the epoch puts the next order in force.

        Args:
            rows: One row per unit, `units x dim`, or a single row. Any device, any floating type; nothing is kept by
                reference. A call takes the rows of a whole batch, as the loader delivers it. It may take several whole
                batches, `steps x units x dim`: signs are not due before the epoch ends, and short rows are balanced
                faster together. The scale of rows does not matter if it is the same for all of them, and their squared
                lengths are numbers of their type (in single precision from 1e-38 to 1e38).
            units: The dataset indices behind the rows, `unit_size` for each, if batches may arrive out of order.
                Without them the rows are those of the next units of the order. Name them always or never.
        """
        if self._attachment is not None:
            raise ValueError("the ordering is attached to a model, whose gradients it observes; call detach() first")
        self._epochs.expect(None)
        self._epochs.observe(rows, units)

    def attach(self, model: nn.Module, *, source: str | GradientSource = "auto", **options: Any) -> None:
        """Observe the gradients of `model` from now on, at every backward pass. No other call is needed.

        Args:
            model: A `DistributedDataParallel` model, one to which `fully_shard` has been applied, or, in one process,
                any module.
            source: Where the gradients of units come from. For single examples: `"sketch"`, a short row for every
                example, which keeps nearly all of the gain, or `"per_example"`, the whole gradient of every example:
                exact, but `examples x parameters` numbers for every batch. `"batch"` (with `unit_size=batch_size`):
                the gradient that a backward pass leaves; a unit is a batch, or several that are accumulated
                (`no_sync`). `"auto"` is `"sketch"` if units are examples and `"batch"` if they are batches; where the
                model shows no single examples, and neither `unit_size` nor `lanes` was given, batches become the
                units. Or a `cdgrab.sources.GradientSource` of your own.
            options: Options of the source; one that it does not have is an error. `"batch"` takes `hook` and
                `hook_state`, a communication hook that averages gradients instead of the all-reduce
                (`DistributedDataParallel` only). All others take `reduction`, that of the loss:
                `"mean"` (default) or `"sum"`. They leave out, with a warning, parameters whose gradients of single
                examples cannot be seen; `strict=True` refuses such models. `"auto"` and `"sketch"` take `length`, a
                power of two, by default 1,024.
        """
        if self._attachment is not None:
            raise ValueError("the ordering is attached to a model already; call detach() first")
        self._settings.check_world_is_the_same()
        self._attachment = find_source(source, options).attach(self._epochs, model)
        if self._epochs.settings is not self._settings:  # batches have become units
            self._settings = self._epochs.settings
            self._config = self._settings.config(self._epochs.lanes)

    def explain(self, model: nn.Module, *inputs: Any, length: int = DEFAULT_LENGTH) -> str:
        """A table of how `attach(model, source="sketch")` sketches each layer of a model, and at what cost.

        Args:
            model: The model.
            inputs: Its arguments for some batch. A forward pass with them counts positions, on which costs depend.
            length: The length of the sketches.
        """
        return explain(model, length, inputs)

    def detach(self) -> None:
        """Stop observing. The model is then as it would be without ordering; the ordering keeps its state."""
        if self._attachment is None:
            raise ValueError("the ordering is not attached to a model; call attach() first")
        self._settled()
        self._attachment.detach()
        self._attachment = None

    def close(self) -> None:
        """Detach the model, and destroy the process group that ordering made for itself.

        It is optional: a process may end, or destroy its groups, without it. Call it on all ranks or on none.
        """
        if self._attachment is not None:
            self.detach()
        self._epochs.close()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; the current one ends with the rows observed so far. Does nothing if they are the same."""
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
        balancing far less. It estimates that of whole gradients, even if sketches decide. `flipped` is the share of
        balancing rows with a minus, `nonfinite` the number left out (a balancing row is a pair's difference, or with
        MeanBalance one centred gradient). `unobserved` is the number of units whose gradient never came. `seconds` is
        the time this process spent on ordering, without averaging gradients; on a GPU, the time to launch the work.
        `bytes` is what this rank sent. `balanced` is the share of the trained numbers that takes part.
        """
        return dict(self._settled().meter.figures)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state from which training continues to the bit, at any step. Nothing in it changes afterwards.

        It is that of all ranks: rank 0 may save it, and any number of ranks load it. All ranks must call this method,
        at the same step.
        """
        epochs = self._settled()
        return self._packed(epochs.all_states())

    def rank_state_dict(self) -> dict[str, Any]:
        """The state of this rank alone, without communication. Every rank saves its own, and as many ranks load them.

        For units that are batches of a large model, of whose stored gradients each rank has a slice.
        """
        return self._packed({self.world.rank: self._settled().state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. A state that does not fit raises `ValueError` and changes nothing.

        With single examples and the same global batch, another number of ranks makes no difference. With another global
        batch, or units that are batches, the examples are dealt anew in their order, and one line says so.
        """
        epochs, content = self._settled(), unpack(state)
        check_config(content.inside("config"), _divided(self._config)[0])
        epochs.load_state_dict(Saved.of(content, self._settings))

    def _packed(self, parts: dict[int, Any]) -> dict[str, Any]:
        config, layout = _divided(self._config)
        return pack({"config": config, "layout": layout, "epoch": self._epochs.epoch, "parts": parts})

    def _asked(self) -> Epochs:
        """The epochs, for somebody who wants to know the order, and may deal it out without the sampler."""
        epochs = self._settled()
        epochs.deliveries.by_hand = True
        return epochs

    def _settled(self) -> Epochs:
        """The epochs, after all pending work of an attached model. Starts no collective: one rank may call it alone."""
        if self._attachment is not None:
            self._attachment.settle()
        return self._epochs


def _divided(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values that a state must share with an ordering, and those in which it may differ."""
    same = {key: value for key, value in config.items() if key not in LAYOUT}
    return same, {key: config[key] for key in LAYOUT}


def _as_indices(units: IntArray) -> Tensor:
    return torch.from_numpy(units.reshape(-1).astype(np.int64))

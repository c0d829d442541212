"""What a source of gradients and an ordering have to do with each other: two protocols, one for each direction."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from cdgrab.lanes import BoolArray

if TYPE_CHECKING:
    from cdgrab.exchange.sharded import ShardedPairs
    from cdgrab.intake import Sketched
    from cdgrab.settings import Settings


@dataclass(frozen=True)
class CountedStep:
    """A step that has been counted: which lanes had a unit, and whether the epoch ends with it.

    Work on it may be done later than it was counted, by another thread, so it says for itself whether it is the last.
    """

    counts_L: BoolArray
    ends_epoch: bool


class Attachment(Protocol):
    """A source at work: what is left on a model between `attach` and `detach`."""

    def settle(self) -> None:
        """Wait until everything handed over has been dealt with; raise what went wrong meanwhile."""

    def detach(self) -> None:
        """Leave the model as it would be without ordering."""


class GradientSource(Protocol):
    """Where the gradients of units come from, with its options: a frozen dataclass.

    `Ordering.attach(model, source=...)` takes one, or its name in `SOURCES`.
    """

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Watch `model` from now on; raises `ValueError` with the reason where that cannot be done."""


class Port(Protocol):
    """What a source may ask of an ordering, and tell it.

    A source that has the rows of a step calls `observe`. One that has slices of them hands these to `slices`, then
    calls `count_step` and, where all ranks come by, `end_epoch_if_due`.
    """

    @property
    def settings(self) -> Settings:
        """What the ordering was asked for: batch and unit size, seed, world."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks, in a group for ordering alone."""

    @property
    def balances(self) -> bool:
        """Whether gradients decide the order. If not, steps are counted all the same."""

    @property
    def slices(self) -> ShardedPairs | None:
        """What takes slices of the gradients of all ranks; None if whole rows are wanted."""

    @property
    def at_start(self) -> bool:
        """Whether nothing of the epoch has been observed."""

    @property
    def is_over(self) -> bool:
        """Whether the epoch has been observed, and its end is still due."""

    def examples_due(self) -> int:
        """How many examples the batch under way has, if units are single examples."""

    def expect(self, sketched: Sketched | None, *, anew: bool = False) -> None:
        """Rows that come from now on are whole (None) or sketches. No collective is started.

        With `anew` they are of other parameters than before, even if their form is the same.

        Within an epoch they stay what they are. Between epochs the draws of the rule go on.
        """

    def observe(self, rows: Tensor) -> None:
        """Take the rows of a step, `units x dim`, and end the epoch if it was the last."""

    def count_step(self) -> CountedStep:
        """Record a step with one unit on each rank, whose rows come as slices or not at all."""

    def end_epoch_if_due(self) -> None:
        """To be called where all ranks come by: ending an epoch takes collectives."""

    def covers(self, share: float) -> None:
        """Say which share of the trained numbers is balanced; 1 if nothing is said."""

    def timed(self) -> AbstractContextManager[None]:
        """What is done in here counts as time spent on ordering."""

    def sent(self, num_bytes: int) -> None:
        """Count bytes that this rank has sent."""

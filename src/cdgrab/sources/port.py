"""The protocols between sources of gradients and an ordering, one for each direction."""

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
    """A counted step: which lanes had a unit, and whether it is the last of the epoch.

    Another thread may work on a step after the next one has been counted, so each carries its own `ends_epoch`.
    """

    counts_L: BoolArray
    ends_epoch: bool


class Attachment(Protocol):
    """A source at work on a model, from `attach` to `detach`."""

    def settle(self) -> None:
        """Wait until all pending work is done; raise its errors."""

    def detach(self) -> None:
        """Leave the model as it would be without ordering."""


class GradientSource(Protocol):
    """Supplies the gradients of units: a frozen dataclass of its options.

    `Ordering.attach(model, source=...)` takes one, or its name in `SOURCES`.
    """

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Observe the gradients of `model` from now on; raise `ValueError`, with the reason, if that is impossible."""


class Port(Protocol):
    """The side of an ordering that a source talks to.

    A source that has the rows of a step calls `observe`. One that has slices of them passes these to `slices`, then
    calls `count_step`, and `end_epoch_if_due` at a point that all ranks reach.
    """

    @property
    def settings(self) -> Settings:
        """The checked arguments of the ordering: batch and unit size, seed, world."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks, in a group for ordering alone."""

    @property
    def balances(self) -> bool:
        """Whether gradients decide the order. Steps are counted in any case."""

    @property
    def slices(self) -> ShardedPairs | None:
        """The sorter for slices of all ranks' gradients; None if the ordering takes whole rows."""

    @property
    def at_start(self) -> bool:
        """Whether nothing of the epoch has been observed."""

    @property
    def is_over(self) -> bool:
        """Whether all of the epoch has been observed, and its end is still due."""

    def examples_due(self) -> int:
        """The number of examples in the batch under way, if units are single examples."""

    def expect(self, sketched: Sketched | None, *, model: str | None = None, anew: bool = False) -> None:
        """Announce whole rows (None) or sketches from now on. Starts no collective.

        `model` is a digest of the parameters whose gradients come, in order: a state within an epoch fits only those.

        Raises `ValueError` if that changes within an epoch. Between epochs the draws of the rule continue. With `anew`
        rows are of other parameters than before, even if their form is the same.
        """

    def make_batches_units(self) -> bool:
        """Make every batch a unit. Returns False, and changes nothing, if the user wants other units or has begun."""

    def observe(self, rows: Tensor) -> None:
        """Take the rows of a step, `units x dim`, and end the epoch after its last step."""

    def count_step(self) -> CountedStep:
        """Count a step with one unit on each rank, whose rows come as slices or not at all."""

    def end_epoch_if_due(self) -> None:
        """End the epoch if all of it has been observed. All ranks must call it: it may start collectives."""

    def covers(self, share: float) -> None:
        """Say which share of the trained numbers is balanced; 1 if nothing is said."""

    def timed(self) -> AbstractContextManager[None]:
        """A context whose duration counts as time spent on ordering."""

    def sent(self, num_bytes: int) -> None:
        """Count bytes that this rank has sent."""

"""Where gradients are taken from a model on their way to the average. The only files that know a wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cdgrab.lanes import BoolArray


@dataclass(frozen=True)
class CountedStep:
    """A step that has been counted: which lanes had a unit, and whether the epoch ends with it.

    Work on it may be done later than it was counted, by another thread, so it says for itself whether it is the last.
    """

    counts_L: BoolArray
    ends_epoch: bool


class Attachment(Protocol):
    """What `Ordering.attach` leaves behind."""

    def settle(self) -> None:
        """Wait until everything handed over has been dealt with; raise what went wrong meanwhile."""

    def detach(self) -> None:
        """Leave the model as it would be without ordering."""

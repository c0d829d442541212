"""What an exchange does: the rows of this process's lanes in, the rows of all lanes that share a running sum out."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cdgrab.lanes import BoolArray
from cdgrab.orders.fill import SignArray


class Exchange(Protocol):
    """Brings together the rows of one step.

    Shapes: `m` visits of this process's `J` lanes go in, of all `L` lanes come out. The columns may be fewer than went
    in: a slice of them, or a sketch.

    Attributes:
        bytes_sent: Bytes this rank has sent so far.
    """

    bytes_sent: int

    def collect(self, rows_mJD: Tensor) -> Tensor | None:
        """Return `rows_mLD`, or None on a rank that leaves the balancing to another one."""

    def counts(self, counts_mJ: BoolArray) -> BoolArray:
        """Return which of all lanes have a unit, where a rank knows only its own, and has another number of visits."""

    def share(self, signs_PL: SignArray) -> SignArray:
        """The signs of the epoch, from whoever decided them to everyone."""

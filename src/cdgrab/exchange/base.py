"""What an exchange does: the rows of this process's lanes in, the rows of all lanes that share a running sum out."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch.distributed as dist
from torch import Tensor

from cdgrab.balancing.rules import RuleMaker
from cdgrab.balancing.sorter import Sorter
from cdgrab.lanes import BoolArray
from cdgrab.orders.fill import SignArray


class Exchange:
    """Brings together the rows of one step. A new one overrides `collect` and `counts`, and what differs.

    Shapes: `m` visits of this process's `J` lanes go in, of all `L` lanes come out. The columns may be fewer than went
    in: a slice of them, or a sketch.

    Attributes:
        name: What it goes by in messages and states; None for rows that stay where they are.
        takes_sketches: Whether short rows of single examples may come in.
        pairs_only: Whether it serves pair differences only.
        shares_signs: Whether one rank decides the signs of all.
        bytes_sent: Bytes this rank has sent so far.
    """

    name: ClassVar[str | None] = "custom"
    takes_sketches: ClassVar[bool] = True
    pairs_only: ClassVar[bool] = False
    shares_signs: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.bytes_sent = 0

    def collect(self, rows_mJD: Tensor) -> Tensor | None:
        """Return `rows_mLD`, or None on a rank that leaves the balancing to another one."""
        raise NotImplementedError(f"{type(self).__name__} has no collect()")

    def counts(self, counts_mJ: BoolArray) -> BoolArray:
        """Return which of all lanes have a unit, where a rank knows only its own, and has another number of visits."""
        raise NotImplementedError(f"{type(self).__name__} has no counts()")

    def share(self, signs_PL: SignArray) -> SignArray:
        """The signs of the epoch, from whoever decided them to everyone."""
        return signs_PL

    def sorter(self, rngs: list[np.random.Generator], make_rule: RuleMaker) -> Sorter | None:  # noqa: ARG002
        """A sorter of its own for what `collect` returns; None if that is whole rows.

        Args:
            rngs: A random generator for every lane whose rows come in.
            make_rule: Makes the rule of one running sum from a random generator.
        """
        return None

"""The base class of exchanges: rows of this process's lanes in, rows of all lanes that share a running sum out."""

from __future__ import annotations

from collections.abc import Callable
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

    Shapes: `m` visits of this process's `J` lanes go in, of all `L` lanes come out. Slices have fewer columns.

    Attributes:
        name: Its name in messages and states; None if rows stay on their rank.
        takes_sketches: Whether it takes short rows of single examples.
        pairs_only: Whether it serves only pair differences.
        shares_signs: Whether one rank decides the signs of all.
        replicates: Whether all ranks have the same rows, so that the state of one is that of all.
        bytes_sent: The bytes this rank has sent so far.
    """

    name: ClassVar[str | None] = "custom"
    takes_sketches: ClassVar[bool] = True
    pairs_only: ClassVar[bool] = False
    shares_signs: ClassVar[bool] = False
    replicates: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.bytes_sent = 0

    def collect(self, rows_mJD: Tensor) -> Tensor | None:
        """Return `rows_mLD`, or None on a rank that leaves the balancing to another one."""
        raise NotImplementedError(f"{type(self).__name__} has no collect()")

    def start(self, rows_mJD: Tensor) -> Callable[[], Tensor | None]:
        """Start to collect, beside training, and return a function that waits for the result.

        `rows_mJD` must not change until then. This one collects at once.
        """
        rows_mLD = self.collect(rows_mJD)
        return lambda: rows_mLD

    def counts(self, counts_mJ: BoolArray) -> BoolArray:
        """Return which of all lanes have a unit in each visit. Ranks know their own lanes, and may differ in `m`."""
        raise NotImplementedError(f"{type(self).__name__} has no counts()")

    def share(self, signs_PL: SignArray) -> SignArray:
        """Return the epoch's signs; the rank that decided them sends them to all others."""
        return signs_PL

    def sorter(self, rngs: list[np.random.Generator], make_rule: RuleMaker) -> Sorter | None:  # noqa: ARG002
        """Return a sorter for what `collect` returns, or None if that is whole rows.

        Args:
            rngs: A random generator for every lane whose rows come in.
            make_rule: Makes the rule of one running sum from a random generator.
        """
        return None

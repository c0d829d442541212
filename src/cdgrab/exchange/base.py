"""What an exchange does: this process's rows in, the rows of every worker that shares a running sum out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cdgrab.orders.decisions import Decided

BoolArray = npt.NDArray[np.bool_]


class Exchange(Protocol):
    """Brings together the rows of one step.

    Shapes: `m` turns of this process's `L` local workers go in, of all `W` workers come out. The columns may be fewer
    than went in: a slice of them, or a sketch.

    Attributes:
        bytes_sent: Bytes this rank has sent so far.
    """

    bytes_sent: int

    def collect(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> tuple[Tensor | None, BoolArray | None]:
        """Return `rows_mWD` and `counts_mW`: which rows are units; the others are ignored. None: all of them are.

        No rows at all are returned on a rank that leaves the balancing to another one.
        """

    def share(self, decided: Decided) -> Decided:
        """Workers and signs of the epoch, in balancing order; from whoever balanced to everyone."""

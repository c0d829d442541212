"""Short rows: a seeded count-sketch of every row is gathered instead of the row.

Inner products of sketches are those of the rows plus noise, so signs, and with them orders, are approximate. The
longer the sketch, the closer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.exchange.gather import Gather
from cdgrab.lanes import BoolArray
from cdgrab.orders.fill import SignArray


class Sketch:
    """Count-sketch to `length` numbers, then `Gather`.

    Coordinate `i` falls into bucket `i mod length` with a random sign, the same on all ranks. Coordinates are not
    hashed at random: neighbours then fall into different buckets, and a sketch is one pass over the row.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, length: int = 4096, seed: int = 0) -> None:
        if length < 1:
            raise ValueError(f"the sketch has length {length}; it must be at least 1")
        self._gather = Gather(group)
        self.bytes_sent = 0
        self._length = length
        self._seed = seed
        self._signs_D = torch.zeros(0)

    def collect(self, rows_mJD: Tensor) -> Tensor:
        collected = self._gather.collect(self.sketch(rows_mJD))
        self.bytes_sent = self._gather.bytes_sent
        return collected

    def counts(self, counts_mJ: BoolArray) -> BoolArray:
        return self._gather.counts(counts_mJ)

    def share(self, signs_PL: SignArray) -> SignArray:
        return signs_PL

    def sketch(self, rows_mJD: Tensor) -> Tensor:
        """Sketch rows along their last dimension."""
        dim = rows_mJD.shape[-1]
        if dim <= self._length:
            return rows_mJD
        if self._signs_D.shape[0] != dim:
            generator = torch.Generator().manual_seed(self._seed)
            signs = torch.randint(0, 2, (dim,), generator=generator, dtype=torch.int8) * 2 - 1
            self._signs_D = signs.to(rows_mJD.device)
        signed = rows_mJD * self._signs_D
        padded = torch.nn.functional.pad(signed, (0, -dim % self._length))
        return padded.view(*padded.shape[:-1], -1, self._length).sum(-2)

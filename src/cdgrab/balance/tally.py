"""What a balancer saw in an epoch: the raw material of `metrics()`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance.rules import FloatArray

_MANY = 1024  # pieces that are joined, so that an epoch does not leave thousands of tiny ones


@dataclass
class Tally:
    """Counts and lengths. `||r||^2` follows from the table, so watching it is free."""

    rows: int = 0
    flipped: int = 0
    nonfinite: int = 0
    norm2: float = 0.0
    max_norm2: float = 0.0
    sum_lengths: float = 0.0

    def __post_init__(self) -> None:
        self._waiting: list[FloatArray] = []  # counted together: that is a dozen calls, which small rows would notice
        self._late: list[Tensor] = []  # likewise, on a device, and later than those that wait

    def add(self, decided_4K: FloatArray) -> None:
        """Count rows: signs, weights (0 for a row that was not finite), inner products, squared lengths."""
        self._waiting.append(decided_4K)
        if len(self._waiting) > _MANY:
            self._count()

    def add_decided(self, decided_4K: Tensor) -> None:
        """Count what `tables.decide` returned; on a GPU it is brought over when somebody asks, not before."""
        if decided_4K.device.type == "cpu":
            self.add(decided_4K.numpy())
            return
        self._late.append(decided_4K)
        if len(self._late) > _MANY:
            self._late = [torch.cat(self._late, dim=1)]

    def settled(self) -> Tally:
        """With everything counted."""
        if self._late:
            late, self._late = self._late, []
            self._waiting.append(torch.cat(late, dim=1).cpu().numpy())
        self._count()
        return self

    def _count(self) -> None:
        """`||r + e d||^2 = ||r||^2 + 2 e <r, d> + ||d||^2`. Summed one by one, however many are counted together."""
        if not self._waiting:
            return
        signs_K, weights_K, s_K, lengths_K = np.concatenate(self._waiting, axis=1)
        self._waiting = []
        norm2_K = np.cumsum(np.concatenate([[self.norm2], 2 * weights_K * s_K + lengths_K]))
        self.rows += len(signs_K)
        self.flipped += int(np.count_nonzero(signs_K < 0))
        self.nonfinite += int(np.count_nonzero(weights_K == 0))
        self.sum_lengths = float(np.cumsum(np.concatenate([[self.sum_lengths], lengths_K]))[-1])
        self.norm2 = float(norm2_K[-1])
        self.max_norm2 = max(self.max_norm2, float(norm2_K[1:].max(initial=0.0)))

"""What a balancer saw in an epoch: the raw material of `metrics()`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance.rules import FloatArray

_MANY = 1024  # pieces on a device that are joined, so that an epoch does not leave thousands of tiny ones


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
        self._late: list[Tensor] = []

    def add(self, signs_K: FloatArray, weights_K: FloatArray, s_K: FloatArray, lengths_K: FloatArray) -> None:
        """Count rows: `||r + e d||^2 = ||r||^2 + 2 e <r, d> + ||d||^2`. A row of weight 0 was not finite."""
        norm2_K = self.norm2 + np.cumsum(2 * weights_K * s_K + lengths_K)
        self.rows += len(signs_K)
        self.flipped += int(np.count_nonzero(signs_K < 0))
        self.nonfinite += int(np.count_nonzero(weights_K == 0))
        self.sum_lengths += float(lengths_K.sum())
        self.norm2 = float(norm2_K[-1])
        self.max_norm2 = max(self.max_norm2, float(norm2_K.max()))

    def add_decided(self, decided_4K: Tensor) -> None:
        """Count what `tables.decide` returned; on a GPU it is brought over when somebody asks, not before."""
        if decided_4K.device.type == "cpu":
            self.add(*decided_4K.numpy())
            return
        self._late.append(decided_4K)
        if len(self._late) > _MANY:
            self._late = [torch.cat(self._late, dim=1)]

    def settled(self) -> Tally:
        """With everything counted."""
        if self._late:
            late, self._late = self._late, []
            self.add(*torch.cat(late, dim=1).cpu().numpy())
        return self

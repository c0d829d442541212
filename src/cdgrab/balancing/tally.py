"""Counts what a balancer does in an epoch, for `metrics()`.

Balancing makes the running sum short in the numbers that decide signs. If these are a sketch, the whole running sum is
longer than its sketch, so the sketch cannot tell its length. Some numbers of every sketch, its witnesses, take no part
in the decisions. `Witness` measures the running sum in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.balancing.rules import FloatArray
from cdgrab.fields import Fields
from cdgrab.orders.fill import SignArray

WITNESS_SHARE = 8  # one in so many numbers of a sketch is a witness
_MOST_PARTS = 1024  # then they are joined, so that an epoch does not leave thousands of tiny arrays


@dataclass
class Tally:
    """Counts and squared lengths. `||r||^2` follows from the table, so tracking it is free."""

    rows: int = 0
    flipped: int = 0
    nonfinite: int = 0
    norm2: float = 0.0
    max_norm2: float = 0.0
    sum_lengths: float = 0.0

    def __post_init__(self) -> None:
        # Counting takes a dozen calls, too many for every block of small rows: parts are counted together.
        self._uncounted: list[FloatArray] = []
        self._on_device: list[Tensor] = []  # later than all of `_uncounted`

    def add(self, decided_4K: FloatArray) -> None:
        """Count rows: signs, weights (0 for a row that was not finite), inner products, squared lengths."""
        self._uncounted.append(decided_4K)
        if len(self._uncounted) > _MOST_PARTS:
            self._count()

    def add_decided(self, decided_4K: Tensor) -> None:
        """Count what `tables.decide` returned. What is on a GPU stays there until `settled` is called."""
        if decided_4K.device.type == "cpu":
            self.add(decided_4K.numpy())
            return
        self._on_device.append(decided_4K)
        if len(self._on_device) > _MOST_PARTS:
            self._on_device = [torch.cat(self._on_device, dim=1)]

    def settled(self) -> Tally:
        """The tally, with everything counted."""
        if self._on_device:
            parts, self._on_device = self._on_device, []
            self._uncounted.append(torch.cat(parts, dim=1).cpu().numpy())
        self._count()
        return self

    @classmethod
    def loaded(cls, state: Fields) -> Tally:
        """The tally that was saved, as a dict of its attributes."""
        counts = [state.whole(key) for key in ("rows", "flipped", "nonfinite")]
        return cls(*counts, *(state.number(key) for key in ("norm2", "max_norm2", "sum_lengths")))

    def _count(self) -> None:
        # ||r + e d||^2 = ||r||^2 + 2 e <r, d> + ||d||^2, summed one by one, so that the parts' sizes do not matter.
        if not self._uncounted:
            return
        signs_K, weights_K, s_K, lengths_K = np.concatenate(self._uncounted, axis=1)
        self._uncounted = []
        norm2_K = np.cumsum(np.concatenate([[self.norm2], 2 * weights_K * s_K + lengths_K]))
        self.rows += len(signs_K)
        self.flipped += int(np.count_nonzero(signs_K < 0))
        self.nonfinite += int(np.count_nonzero(weights_K == 0))
        self.sum_lengths = float(np.cumsum(np.concatenate([[self.sum_lengths], lengths_K]))[-1])
        self.norm2 = float(norm2_K[-1])
        self.max_norm2 = max(self.max_norm2, float(norm2_K[1:].max(initial=0.0)))


@dataclass
class Witness:
    """The running sum in the witnesses. Nothing here waits for a device."""

    running_sum: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    max_norm2: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    sum_lengths: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, rows_Kw: Tensor, signs_K: SignArray | Tensor) -> None:
        """Take rows in balancing order, with their signs."""
        # As in the balancer, a row counts if its squared length is finite in the type of the rows.
        counts_K1 = (WITNESS_SHARE * rows_Kw.square()).sum(1, keepdim=True).isfinite()
        rows_Kw = torch.where(counts_K1, rows_Kw, 0.0).double()
        signed_Kw = rows_Kw * torch.as_tensor(signs_K, device=rows_Kw.device)[:, None]
        if self.running_sum.numel() == 0:
            self.running_sum = rows_Kw.new_zeros(rows_Kw.shape[1])
        prefixes_Kw = self.running_sum.to(rows_Kw.device) + signed_Kw.cumsum(0)
        self.running_sum = prefixes_Kw[-1].clone()
        self.max_norm2 = torch.maximum(self.max_norm2.to(rows_Kw.device), prefixes_Kw.square().sum(1).max())
        self.sum_lengths = self.sum_lengths.to(rows_Kw.device) + rows_Kw.square().sum()

    def seen_by(self, tally: Tally) -> Tally:
        """The tally of the same rows, with lengths measured in the witnesses."""
        return replace(tally, max_norm2=float(self.max_norm2), sum_lengths=float(self.sum_lengths))

    def state_dict(self) -> dict[str, Any]:
        return {
            "running_sum": self.running_sum.clone(),
            "max_norm2": self.max_norm2.clone(),
            "sum_lengths": self.sum_lengths.clone(),
        }

    @classmethod
    def loaded(cls, state: Fields, watched: int) -> Witness:
        """The witness that was saved, of so many numbers."""
        running_sum = state.tensor("running_sum", (0, watched), dtype=torch.float64)
        return cls(running_sum, *(state.tensor(key, dtype=torch.float64) for key in ("max_norm2", "sum_lengths")))

"""One running sum, and whatever decides signs against it fastest where the rows are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing import tables
from cdgrab.balancing.rules import FloatArray, Rule, thresholds_of
from cdgrab.balancing.tables import Differences, balance
from cdgrab.balancing.tally import Tally, Witness
from cdgrab.orders.fill import SignArray

Signs = SignArray | Tensor

_TABLE_PAYS = 1 << 11  # on a CPU rows up to this length go through a table


def block_size(rows_KD: Tensor) -> int:
    """How many rows share a table: their Gram matrix costs `K * dim` operations per row, the table a call or two."""
    if rows_KD.is_cuda:
        dim = rows_KD.shape[1]
        return 64 if dim < tables.LONG_ON_GPU else 8 if dim < tables.HUGE_ON_GPU else 16
    return 64 if rows_KD.shape[1] <= 2048 else 32


@dataclass
class Balancer:
    """One running sum: takes rows in balancing order, gives their signs.

    A row that is not finite (or so long that its squared length is not) gets the sign `+1`, so that its pair keeps its
    order, and leaves the running sum as it was.
    """

    rule: Rule
    running_sum: Tensor = field(default_factory=lambda: torch.zeros(0))
    tally: Tally = field(default_factory=Tally)
    scratch: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    watched: int = 0  # numbers at the end of a row that are witnesses, and take no part in the decisions
    witness: Witness = field(default_factory=Witness)

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        """Begin at a running sum of zero."""
        self.running_sum.zero_()
        self.tally, self.witness = Tally(), Witness()
        self.rule.start_epoch(epoch, num_rows)

    def balance(self, rows_KD: Tensor) -> Signs:
        """Decide the signs of the next rows (float32 or float64; nothing is kept by reference).

        Signs of rows on a GPU are a tensor of numbers there: asking for their values would make the host wait.
        """
        if len(rows_KD) == 0:
            return np.empty(0, dtype=np.int8)
        deciding_KD, watched_Kw = self._split(rows_KD)
        signs = self._balance(deciding_KD)
        if self.watched:
            self.witness.add(watched_Kw, signs)
        return signs

    def balance_visits(self, rows_pLD: Tensor, minus_pLD: Tensor) -> Signs:
        """Decide the signs of the rows `rows - minus` visit by visit, lane by lane: `p * L` of them."""
        rows, watched_rows = self._split(rows_pLD)
        minus, watched_minus = self._split(minus_pLD)
        signs = self._balance_visits(rows, minus)
        if self.watched:
            self.witness.add((watched_rows - watched_minus).flatten(0, 1), signs)
        return signs

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that decide, and the witnesses."""
        end = rows.shape[-1] - self.watched
        return rows[..., :end], rows[..., end:]

    def _balance(self, rows_KD: Tensor) -> Signs:
        self._make_room(rows_KD)
        if rows_KD.device.type != "cpu":
            return self._balance_blocks(rows_KD, None)
        if compiled.available():
            rows = rows_KD.contiguous().numpy()
            thresholds_K = thresholds_of(self.rule, len(rows), lambda: compiled.lengths(rows))
            return self._counted(compiled.row_signs(rows, self.running_sum.numpy(), thresholds_K))
        return self._balance_blocks(rows_KD, None) if rows_KD.shape[1] <= _TABLE_PAYS else self._balance_rows(rows_KD)

    def _balance_visits(self, rows_pLD: Tensor, minus_pLD: Tensor) -> Signs:
        self._make_room(rows_pLD)
        if rows_pLD.device.type == "cpu":
            if compiled.available():
                return self._visits_compiled(rows_pLD, minus_pLD)
            return self._balance((rows_pLD - minus_pLD).flatten(0, 1))
        if not tables.takes_blocks(rows_pLD, minus_pLD):
            signs = [self._balance_blocks(rows, minus) for rows, minus in zip(rows_pLD, minus_pLD, strict=True)]
            return torch.cat([torch.as_tensor(part) for part in signs])
        decided_4N = tables.balance_blocks(rows_pLD, minus_pLD, self.running_sum, self.rule)
        self.tally.add_decided(decided_4N)
        return decided_4N[0]

    def _make_room(self, rows: Tensor) -> None:
        if self.running_sum.numel() == 0:
            self.running_sum = torch.zeros(rows.shape[-1], dtype=rows.dtype, device=rows.device)

    def _balance_blocks(self, rows_KD: Tensor, minus_KD: Tensor | None) -> Signs:
        size = block_size(rows_KD)
        signs = []
        for k in range(0, len(rows_KD), size):
            batch = Differences(rows_KD[k : k + size], None if minus_KD is None else minus_KD[k : k + size])
            signs.append(balance(batch, self.running_sum, self.rule, self.tally)[0])
        signs_K = signs[0] if len(signs) == 1 else torch.cat(signs)
        return signs_K.to(torch.int8).numpy() if signs_K.device.type == "cpu" else signs_K

    def _scratch(self, num_rows: int, like: Tensor) -> Tensor:
        """Room for a few rows, kept because allocating it anew costs more than filling it."""
        if self.scratch.shape != (num_rows, like.shape[-1]):
            self.scratch = like.new_zeros(num_rows, like.shape[-1])
        return self.scratch

    def _balance_rows(self, rows_KD: Tensor) -> SignArray:
        """Row by row: on a CPU a Gram matrix of long rows costs more than it saves.

        NumPy's calls cost less than PyTorch's, PyTorch's use all cores; hence one for rows up to a certain length and
        the other beyond.
        """
        threads = rows_KD.shape[1] >= compiled.ALL_CORES
        r_D: Any = self.running_sum if threads else self.running_sum.numpy()
        rows: Any = rows_KD if threads else rows_KD.numpy()
        module: Any = torch if threads else np
        decided_4K = np.zeros((4, len(rows)))
        thresholds_K = thresholds_of(self.rule, len(rows), lambda: compiled.lengths(rows_KD.numpy())).tolist()
        with np.errstate(all="ignore"):
            for k in range(len(rows)):
                length = module.dot(rows[k], rows[k]).item()
                if not length < math.inf:
                    decided_4K[0, k] = 1
                    continue
                s = module.dot(rows[k], r_D).item()
                sign = 1 if s <= thresholds_K[k] else -1
                (module.add if sign == 1 else module.subtract)(r_D, rows[k], out=r_D)
                decided_4K[:, k] = sign, sign, s, length
        return self._counted(decided_4K)

    def _visits_compiled(self, rows_pLD: Tensor, minus_pLD: Tensor) -> SignArray:
        visits, lanes, _ = rows_pLD.shape
        thresholds_K = thresholds_of(
            self.rule,
            visits * lanes,
            lambda: compiled.lengths(rows_pLD.flatten(0, 1).numpy(), minus_pLD.flatten(0, 1).numpy()),
        )
        scratch_2D = self._scratch(2, rows_pLD).numpy()
        running_sum_D = self.running_sum.numpy()
        return self._counted(compiled.visit_signs(rows_pLD, minus_pLD, scratch_2D, running_sum_D, thresholds_K))

    def _counted(self, decided_4K: FloatArray) -> SignArray:
        self.tally.add(decided_4K)
        signs_K: SignArray = decided_4K[0].astype(np.int8)
        return signs_K

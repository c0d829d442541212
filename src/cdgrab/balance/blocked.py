"""Signs of a block of rows from its table of inner products.

Let `d_1 .. d_K` be rows in balancing order and `r` the running sum before them. Row `k` meets the running sum
`r + e_1 d_1 + ... + e_{k-1} d_{k-1}`, so its inner product with it is

    s_k = <r, d_k> + sum over j < k of e_j <d_j, d_k>.

The `K` signs therefore follow from `K` dots with `r` and the `K x K` Gram matrix alone; then `r += e @ rows`, once.
This is the paper's loop exactly, up to rounding. Whoever can supply the table need not hold the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance import compiled
from cdgrab.balance.rules import FloatArray, Rule
from cdgrab.order.fill import SignArray

# Signs of this many rows are decided in plain Python before the rest of the table is brought up to date at once.
_CHUNK = 8

# On a CPU: rows up to this length go through a table, and rows from that one on occupy all cores.
_TABLE_PAYS = 1 << 11
_ALL_CORES = 1 << 15


def block_signs(gram_KK: FloatArray, dots_K: FloatArray, thresholds_K: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Decide the signs of `K` rows from their inner products.

    Args:
        gram_KK: Inner products of the rows with each other.
        dots_K: Inner products of the rows with the running sum before the first of them.
        thresholds_K: Row `k` is `+1` if and only if `s_k <= thresholds_K[k]`.

    Returns:
        The signs (`+1.0` or `-1.0`) and the inner products `s_K` they were decided on.

    Example:
        >>> rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> block_signs(rows @ rows.T, np.zeros(3), np.zeros(3))[0]
        array([ 1., -1.,  1.])
    """
    s_K = dots_K.copy()
    signs_K = np.empty(len(s_K))
    for start in range(0, len(s_K), _CHUNK):
        stop = min(start + _CHUNK, len(s_K))
        table = gram_KK[start:stop, start:stop].tolist()
        dots = s_K[start:stop].tolist()
        limits = thresholds_K[start:stop].tolist()
        signs: list[float] = []
        for k, row in enumerate(table):
            s = dots[k]
            for sign, product in zip(signs, row, strict=False):
                s += sign * product
            dots[k] = s
            signs.append(1.0 if s <= limits[k] else -1.0)
        s_K[start:stop] = dots
        signs_K[start:stop] = signs
        s_K[stop:] += signs_K[start:stop] @ gram_KK[start:stop, stop:]
    return signs_K, s_K


def block_size(dim: int) -> int:
    """How many rows share a table: their Gram matrix costs `K * dim` operations per row."""
    return 64 if dim <= 2048 else 32


@dataclass
class Tally:
    """What a balancer saw in an epoch. `||r||^2` follows from the table, so watching it is free."""

    rows: int = 0
    flipped: int = 0
    nonfinite: int = 0
    norm2: float = 0.0
    max_norm2: float = 0.0
    sum_lengths: float = 0.0

    def add(self, signs_K: FloatArray, s_K: FloatArray, lengths_K: FloatArray) -> None:
        """Count rows: `||r + e d||^2 = ||r||^2 + 2 e <r, d> + ||d||^2`."""
        norm2_K = self.norm2 + np.cumsum(2 * signs_K * s_K + lengths_K)
        self.rows += len(signs_K)
        self.flipped += int(np.count_nonzero(signs_K < 0))
        self.sum_lengths += float(lengths_K.sum())
        self.norm2 = float(norm2_K[-1])
        self.max_norm2 = max(self.max_norm2, float(norm2_K.max()))


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

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        """Begin at a running sum of zero."""
        self.running_sum.zero_()
        self.tally = Tally()
        self.rule.start_epoch(epoch, num_rows)

    def balance(self, rows_KD: Tensor, minus_KD: Tensor | None = None) -> SignArray:
        """Decide the signs of the next rows, `rows - minus` (float32 or float64; nothing is kept by reference)."""
        if len(rows_KD) == 0:
            return np.empty(0, dtype=np.int8)
        if self.running_sum.numel() == 0:
            self.running_sum = torch.zeros(rows_KD.shape[1], dtype=rows_KD.dtype, device=rows_KD.device)
        if rows_KD.device.type != "cpu":
            return self._balance_blocks(rows_KD if minus_KD is None else rows_KD - minus_KD)
        if compiled.available():
            return self._balance_compiled(rows_KD, minus_KD)
        if minus_KD is None and rows_KD.shape[1] <= _TABLE_PAYS:
            return self._balance_blocks(rows_KD)
        return self._balance_rows(rows_KD, minus_KD)

    def _balance_blocks(self, rows_KD: Tensor) -> SignArray:
        blocks = [self._balance_table(block_KD) for block_KD in rows_KD.split(block_size(rows_KD.shape[1]))]
        return self._counted(*(np.concatenate(column) for column in zip(*blocks, strict=True)))

    def _scratch(self, num_rows: int, like: Tensor) -> Tensor:
        """Room for a few rows, kept because allocating it anew costs more than filling it."""
        if self.scratch.shape != (num_rows, like.shape[1]):
            self.scratch = like.new_zeros(num_rows, like.shape[1])
        return self.scratch

    def _balance_table(self, rows_KD: Tensor) -> tuple[FloatArray, FloatArray, FloatArray]:
        gram_KK, dots_K = self._table(rows_KD)
        lengths_K = gram_KK.diagonal()
        thresholds_K = self.rule.thresholds(len(lengths_K), lambda: np.where(np.isfinite(lengths_K), lengths_K, 0.0))
        finite_K = np.isfinite(lengths_K)
        if not finite_K.all():
            keep_K = torch.from_numpy(finite_K).to(rows_KD.device)
            rows_KD = torch.where(keep_K[:, None], rows_KD, 0.0)
            gram_KK, dots_K = self._table(rows_KD)
            thresholds_K = np.where(finite_K, thresholds_K, np.inf)
        signs_K, s_K = block_signs(gram_KK, dots_K, thresholds_K)
        self.running_sum.addmv_(rows_KD.T, torch.from_numpy(signs_K).to(self.running_sum))
        return signs_K, s_K, lengths_K

    def _table(self, rows_KD: Tensor) -> tuple[FloatArray, FloatArray]:
        """Inner products of the rows with each other, and with the running sum, in one transfer to the host."""
        table_KK1 = torch.cat([rows_KD @ rows_KD.T, (rows_KD @ self.running_sum)[:, None]], dim=1)
        table = table_KK1.to("cpu", torch.float64).numpy()
        return table[:, :-1], table[:, -1]

    def _balance_rows(self, rows_KD: Tensor, minus_KD: Tensor | None) -> SignArray:
        """Row by row: on a CPU a Gram matrix of long rows costs more than it saves.

        NumPy's calls cost less than PyTorch's, PyTorch's use all cores; hence one for rows up to a certain length and
        the other beyond.
        """
        threads = rows_KD.shape[1] >= _ALL_CORES
        r_D = self.running_sum if threads else self.running_sum.numpy()
        row_D = self._scratch(1, rows_KD)[0] if threads else self._scratch(1, rows_KD)[0].numpy()
        rows = rows_KD if threads else rows_KD.numpy()
        minus = minus_KD if threads or minus_KD is None else minus_KD.numpy()
        module: Any = torch if threads else np
        signs_K, s_K, lengths_K = np.empty((3, len(rows)))
        thresholds_K = self.rule.thresholds(
            len(rows), lambda: compiled.lengths(rows_KD.numpy(), None if minus_KD is None else minus_KD.numpy())
        ).tolist()
        with np.errstate(all="ignore"):
            for k in range(len(rows)):
                d_D = rows[k] if minus is None else module.subtract(rows[k], minus[k], out=row_D)
                lengths_K[k] = length = module.dot(d_D, d_D).item()
                s_K[k] = s = module.dot(d_D, r_D).item()
                signs_K[k] = sign = 1 if not length < math.inf or s <= thresholds_K[k] else -1
                if length < math.inf:
                    (module.add if sign == 1 else module.subtract)(r_D, d_D, out=r_D)
        return self._counted(signs_K, s_K, lengths_K)

    def _balance_compiled(self, rows_KD: Tensor, minus_KD: Tensor | None) -> SignArray:
        rows = rows_KD.contiguous().numpy()
        minus = None if minus_KD is None else minus_KD.contiguous().numpy()
        thresholds_K = self.rule.thresholds(len(rows), lambda: compiled.lengths(rows, minus))
        scratch_2D = self._scratch(2, rows_KD).numpy()
        signs_K, s_K, lengths_K = compiled.row_signs(rows, minus, scratch_2D, self.running_sum.numpy(), thresholds_K)
        return self._counted(signs_K, s_K, lengths_K)

    def _counted(self, signs_K: FloatArray, s_K: FloatArray, lengths_K: FloatArray) -> SignArray:
        finite_K = np.isfinite(lengths_K)
        self.tally.add(signs_K, np.where(finite_K, s_K, 0.0), np.where(finite_K, lengths_K, 0.0))
        self.tally.nonfinite += len(finite_K) - int(finite_K.sum())
        return signs_K.astype(np.int8)

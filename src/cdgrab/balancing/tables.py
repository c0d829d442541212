"""Makes a table of rows, decides signs from it, and adds the signed rows to the running sum.

On a CPU compiled code may form the table; on a GPU each step is a Triton kernel; without either, plain PyTorch does it.
On a GPU nothing here makes the host wait, unless the rule asks for lengths.

Shapes: `K` rows of `D` numbers; a table is `K x (K + 1)`, the Gram matrix and the inner products with the running sum.
"""

from __future__ import annotations

import functools
import importlib.metadata
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing.blocked import block_signs
from cdgrab.balancing.rules import FloatArray, Rule, thresholds_of
from cdgrab.balancing.tally import Tally

_CPU_COLUMNS = 1 << 14  # that a CPU multiplies at a time
LONG_ON_GPU = 1 << 19  # from this row length on, reading the rows takes longer than launching the kernels
HUGE_ON_GPU = 1 << 23  # from this row length on, the kernels fill a GPU; nothing else can run beside them


RunningSum = TypeVar("RunningSum", contravariant=True)


class GradientBatch(Protocol[RunningSum]):
    """Rows to be balanced, in any form that has a table and can be added to a running sum."""

    def table(self, running_sum: RunningSum) -> Tensor:
        """`K x (K + 1)`: inner products of the rows with each other, then those with the running sum, in float64."""

    def add_to(self, running_sum: RunningSum, weights_K: Tensor) -> None:
        """Add the rows, each times its weight, to the running sum. A row of weight 0 may be anything, even NaN."""


@dataclass(frozen=True)
class Differences:
    """The whole rows `rows - minus`, or `rows` if `minus` is None: a `GradientBatch`."""

    rows_KD: Tensor
    minus_KD: Tensor | None = None

    def table(self, running_sum: Tensor) -> Tensor:
        return table(self.rows_KD, self.minus_KD, running_sum)

    def add_to(self, running_sum: Tensor, weights_K: Tensor) -> None:
        advance(running_sum, self.rows_KD, self.minus_KD, weights_K)


def balance(batch: GradientBatch[RunningSum], running_sum: RunningSum, rule: Rule, tally: Tally) -> Tensor:
    """Decide the signs of a batch and add its rows to the running sum. Returns what `decide` does."""
    decided_4K = decide(batch.table(running_sum), rule)
    batch.add_to(running_sum, decided_4K[1])
    tally.add_decided(decided_4K)
    return decided_4K


def table(rows_KD: Tensor, minus_KD: Tensor | None, running_sum_D: Tensor) -> Tensor:
    """The table of the rows `rows - minus`, in float64 on their device."""
    if _fits_table_kernels(rows_KD, minus_KD):
        from cdgrab.accel import triton_tables as kernels

        with _device_of(rows_KD):
            return kernels.table(rows_KD, minus_KD, running_sum_D, in_place=False)
    return _plain_table(rows_KD if minus_KD is None else rows_KD - minus_KD, running_sum_D)


def difference_table(first_KD: Tensor, second_KD: Tensor, running_sum_D: Tensor) -> Tensor:
    """Replace `first` by `first - second` in place, and return the table of these rows.

    Args:
        first_KD: Float32 or float64, contiguous; overwritten.
        second_KD: Of any floating type.
        running_sum_D: Of the type of `first_KD`.

    Example:
        >>> first = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
        >>> difference_table(first, torch.ones(2, 2), torch.tensor([1.0, 5.0]))
        tensor([[4., 0., 2.],
                [0., 0., 0.]], dtype=torch.float64)
        >>> first
        tensor([[2., 0.],
                [0., 0.]])
    """
    if _fits_table_kernels(first_KD, second_KD):
        from cdgrab.accel import triton_tables as kernels

        with _device_of(first_KD):
            return kernels.table(first_KD, second_KD, running_sum_D, in_place=True)
    same = second_KD.dtype == first_KD.dtype and second_KD.is_contiguous()
    if first_KD.device.type == "cpu" and same and compiled.available():
        return torch.from_numpy(compiled.difference_table(first_KD.numpy(), second_KD.numpy(), running_sum_D.numpy()))
    # On a CPU some columns at a time: they are multiplied while in cache, and sums in single precision have few terms.
    width = _CPU_COLUMNS if first_KD.device.type == "cpu" else first_KD.shape[1]
    parts = zip(first_KD.split(width, 1), second_KD.split(width, 1), running_sum_D.split(width), strict=True)
    return torch.stack([_plain_table(first.sub_(second), r) for first, second, r in parts]).sum(0)


def decide(table_KK1: Tensor, rule: Rule) -> Tensor:
    """Decide the signs of `K` rows.

    A row whose squared length is not finite gets the sign `+1`, so that its pair keeps its order, and the weight 0.

    Returns:
        `4 x K` in float64 on the table's device: signs; the weights of the rows in the running sum; the inner products
        that decided the signs; squared lengths. The last two are 0 for a row that is not finite.
    """
    lengths_K = table_KK1.diagonal()
    thresholds_K = thresholds_of(rule, len(table_KK1), lambda: _finite(lengths_K.cpu().numpy()))
    if table_KK1.device.type == "cpu":
        return torch.from_numpy(_decide_on_cpu(table_KK1.numpy(), thresholds_K))
    limits_K = _on_device(thresholds_K, table_KK1.device)
    if _has_triton():
        from cdgrab.accel import triton_signs as kernels

        with _device_of(table_KK1):
            return kernels.decide(table_KK1, limits_K)
    return decide_there(table_KK1, limits_K)


def advance(running_sum_D: Tensor, rows_KD: Tensor, minus_KD: Tensor | None, weights_K: Tensor) -> None:
    """Add the rows `rows - minus`, each times its weight, to the running sum. A row of weight 0 may be NaN."""
    if _fits_table_kernels(rows_KD, minus_KD):
        from cdgrab.accel import triton_tables as kernels

        with _device_of(rows_KD):
            kernels.advance(running_sum_D, rows_KD, minus_KD, weights_K)
        return
    differences_KD = rows_KD if minus_KD is None else rows_KD - minus_KD
    if rows_KD.device.type != "cpu" or not bool(weights_K.all()):
        # Zero times NaN is NaN.
        differences_KD = torch.where(weights_K[:, None] != 0, differences_KD, 0.0)
    running_sum_D.addmv_(differences_KD.T, weights_K.to(running_sum_D.dtype))


def takes_blocks(rows_mLD: Tensor, minus_mLD: Tensor) -> bool:
    """Whether `balance_blocks` suits these rows: for longer ones, fewer passes over them are faster."""
    return rows_mLD.numel() > 0 and rows_mLD.shape[2] < LONG_ON_GPU and _fits_kernels(rows_mLD, minus_mLD)


def balance_blocks(rows_mLD: Tensor, minus_mLD: Tensor, running_sum_D: Tensor, rule: Rule) -> Tensor:
    """Decide the signs of all the rows `rows - minus`, visit by visit, and add them to the running sum.

    Equals `table`, `decide` and `advance`, block by block.
    """
    from cdgrab.accel import triton_blocks as kernels

    limits_N = _thresholds(rows_mLD, minus_mLD, rule)
    with _device_of(rows_mLD):
        return kernels.balance_blocks(kernels.Rows.of(rows_mLD), kernels.Rows.of(minus_mLD), running_sum_D, limits_N)


def _thresholds(rows_mLD: Tensor, minus_mLD: Tensor, rule: Rule) -> Tensor:
    """The thresholds of the rows `rows - minus`, on their device."""
    thresholds_N = thresholds_of(
        rule,
        rows_mLD.shape[0] * rows_mLD.shape[1],
        lambda: _finite((rows_mLD - minus_mLD).square().sum(-1).flatten().double().cpu().numpy()),
    )
    return _on_device(thresholds_N, rows_mLD.device)


def decide_there(table_KK1: Tensor, thresholds_K: Tensor) -> Tensor:
    """The plain twin of the Triton kernel: `decide` on the table's device, in many small operations."""
    lengths_K = table_KK1.diagonal()
    finite_K = torch.isfinite(lengths_K)
    gram_KK = torch.where(finite_K[:, None] & finite_K, table_KK1[:, :-1], 0.0)
    s_K = torch.where(finite_K, table_KK1[:, -1], 0.0)
    limits_K = torch.where(finite_K, thresholds_K, torch.inf)
    signs_K = torch.ones_like(s_K)
    for k in range(len(s_K)):
        signs_K[k] = torch.where(s_K[k] <= limits_K[k], 1.0, -1.0)
        s_K[k + 1 :] += signs_K[k] * gram_KK[k, k + 1 :]
    return torch.stack([signs_K, torch.where(finite_K, signs_K, 0.0), s_K, torch.where(finite_K, lengths_K, 0.0)])


def _decide_on_cpu(table_KK1: FloatArray, thresholds_K: FloatArray) -> FloatArray:
    lengths_K = table_KK1.diagonal()
    finite_K = np.isfinite(lengths_K)
    gram_KK, dots_K = table_KK1[:, :-1], table_KK1[:, -1]
    if not finite_K.all():
        gram_KK, dots_K = np.where(finite_K[:, None] & finite_K, gram_KK, 0.0), np.where(finite_K, dots_K, 0.0)
        thresholds_K = np.where(finite_K, thresholds_K, np.inf)
    signs_K, s_K = block_signs(gram_KK, dots_K, thresholds_K)
    return np.stack([signs_K, np.where(finite_K, signs_K, 0.0), s_K, _finite(lengths_K)])


def _plain_table(rows_KD: Tensor, running_sum_D: Tensor) -> Tensor:
    return torch.cat([rows_KD @ rows_KD.T, (rows_KD @ running_sum_D)[:, None]], dim=1).double()


def _finite(lengths_K: FloatArray) -> FloatArray:
    return np.where(np.isfinite(lengths_K), lengths_K, 0.0)


def _on_device(thresholds_K: FloatArray, device: torch.device) -> Tensor:
    if thresholds_K.any():
        return torch.from_numpy(thresholds_K).to(device)
    return _zeros(len(thresholds_K), device)


@functools.lru_cache(maxsize=128)
def _zeros(count: int, device: torch.device) -> Tensor:
    """The thresholds of the greedy rule."""
    return torch.zeros(count, dtype=torch.float64, device=device)


def _device_of(rows: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of the rows is current: Triton launches kernels there, or interprets them."""
    return torch.cuda.device(rows.device) if rows.is_cuda else nullcontext()


@functools.cache
def _has_triton() -> bool:
    """Whether Triton is installed and new enough for tuples, which the kernels use."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 3)


def _fits_kernels(*tensors: Tensor) -> bool:
    """Whether the kernels can read these tensors in place."""
    readable = all(t.is_cuda and t.dtype == torch.float32 and t.stride(-1) == 1 for t in tensors)
    return readable and _has_triton()


def _fits_table_kernels(rows_KD: Tensor, minus_KD: Tensor | None) -> bool:
    """Whether the kernels for tables take these rows."""
    tensors = [rows_KD] if minus_KD is None else [rows_KD, minus_KD]
    return rows_KD.shape[0] <= 64 and rows_KD.shape[1] > 0 and _fits_kernels(*tensors)

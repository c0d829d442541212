"""Triton kernels for many blocks of short rows on a GPU: one launch per block, without waiting for the host.

The twin in plain PyTorch is `tables.table`, `tables.decide` and `tables.advance`, block by block. Sums are formed in a
fixed order, so that a run can be repeated bit for bit.
"""

# Kernels are written in Triton's language, which only looks like Python to a type checker.
# mypy: ignore-errors

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdgrab.accel.triton_signs import sign_loop
from cdgrab.accel.triton_tables import PROGRAMS, precision

_STEP_COLUMNS = 256
_BLOCK = 64


class Rows(NamedTuple):
    """Rows in memory. Row `n` is that of visit `n // num_lanes` and lane `n % num_lanes`."""

    first: Tensor
    num_lanes: int
    visit_stride: int
    row_stride: int

    @classmethod
    def of(cls, rows_mLD: Tensor) -> Rows:
        return cls(rows_mLD, rows_mLD.shape[1], rows_mLD.stride(0), rows_mLD.stride(1))

    @property
    def count(self) -> int:
        return self.first.shape[0] * self.first.shape[1]


def balance_blocks(rows: Rows, minus: Rows, running_sum_D: Tensor, thresholds_N: Tensor) -> Tensor:
    """Decide the signs of the rows `rows - minus`, block by block, and add them to the running sum.

    The Gram matrices of all blocks come first, in one launch. Then each block takes one launch, which adds the block
    before to the running sum, computes the inner products with it, and decides the signs.

    Returns:
        `4 x N`, as `tables.decide` does.
    """
    count, dim, device = rows.count, running_sum_D.numel(), running_sum_D.device
    num_blocks = math.ceil(count / _BLOCK)
    columns = 64
    programs = max(1, min(math.ceil(2 * PROGRAMS / num_blocks), math.ceil(dim / columns)))
    width = math.ceil(dim / (programs * columns)) * columns
    programs = math.ceil(dim / width)
    gram_BPKK = torch.empty(num_blocks, programs, _BLOCK, _BLOCK, dtype=torch.float32, device=device)
    where = (rows.num_lanes, rows.visit_stride, rows.row_stride, minus.visit_stride, minus.row_stride)
    _grams[(programs, num_blocks)](
        rows.first,
        minus.first,
        gram_BPKK,
        *where,
        count,
        dim,
        width,
        ROWS=_BLOCK,
        COLUMNS=columns,
        PRECISION=precision(device),
        num_warps=4,
        num_stages=1,
    )
    gram_BKK = gram_BPKK.sum(1, dtype=torch.float64)
    decided_4N = torch.empty(4, count, dtype=torch.float64, device=device)
    parts = math.ceil(dim / _STEP_COLUMNS)
    dots_PK = torch.empty(parts, _BLOCK, dtype=torch.float32, device=device)
    arrived_B = torch.zeros(num_blocks + 1, dtype=torch.int32, device=device)
    for block in range(num_blocks + 1):
        _step[(parts,)](
            running_sum_D,
            rows.first,
            minus.first,
            gram_BKK,
            thresholds_N,
            decided_4N,
            dots_PK,
            arrived_B,
            *where,
            block,
            count,
            dim,
            ROWS=_BLOCK,
            COLUMNS=_STEP_COLUMNS,
            TILE=16,
            BEFORE=block > 0,
            AFTER=block < num_blocks,
            num_warps=4,
        )
    return decided_4N


@triton.jit
def _grams(
    rows,
    minus,
    partial,
    num_lanes,
    visit_stride,
    row_stride,
    minus_visit_stride,
    minus_row_stride,
    count,
    dim,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the Gram matrices of blocks of rows; a program takes `width` columns of one block."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    begin = program * width
    end = tl.minimum(begin + width, dim)
    k = tl.arange(0, ROWS)
    row = block * ROWS + k[:, None]
    visit, lane = row // num_lanes, row % num_lanes
    mine = rows + visit * visit_stride + lane * row_stride
    theirs = minus + visit * minus_visit_stride + lane * minus_row_stride
    gram = tl.zeros([ROWS, ROWS], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < count) & (column < end)
        d = tl.load(mine + column, mask=inside, other=0.0) - tl.load(theirs + column, mask=inside, other=0.0)
        gram += tl.dot(d, tl.trans(d), input_precision=PRECISION)
    out = partial + (block * tl.num_programs(0) + program) * ROWS * ROWS
    tl.store(out + k[:, None] * ROWS + k[None, :], gram)


@triton.jit
def _step(
    running_sum,
    rows,
    minus,
    grams,
    thresholds,
    decided,
    dots,
    arrived,
    num_lanes,
    visit_stride,
    row_stride,
    minus_visit_stride,
    minus_row_stride,
    block,
    count,
    dim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Add the block before, multiply this block with the new running sum. The last program to arrive decides."""
    program = tl.program_id(0).to(tl.int64)
    column = program * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = tl.arange(0, TILE)[:, None].to(tl.int64)
    inside = column < dim
    r = tl.load(running_sum + column, mask=inside, other=0.0)
    if BEFORE:
        for start in range((block - 1) * ROWS, block * ROWS, TILE):
            k = start + tile
            weight = tl.load(decided + count + k, mask=k < count, other=0.0).to(tl.float32)
            counts = inside & (weight != 0)  # a row that is not finite is not even read
            visit, lane = k // num_lanes, k % num_lanes
            x = tl.load(rows + visit * visit_stride + lane * row_stride + column, mask=counts, other=0.0)
            x -= tl.load(minus + visit * minus_visit_stride + lane * minus_row_stride + column, mask=counts, other=0.0)
            r += tl.sum(weight * x, 0)[None, :]
        tl.store(running_sum + column, r, mask=inside)
    if AFTER:
        for start in range(0, ROWS, TILE):
            k = block * ROWS + start + tile
            counts = inside & (k < count)
            visit, lane = k // num_lanes, k % num_lanes
            x = tl.load(rows + visit * visit_stride + lane * row_stride + column, mask=counts, other=0.0)
            x -= tl.load(minus + visit * minus_visit_stride + lane * minus_row_stride + column, mask=counts, other=0.0)
            tl.store(dots + program * ROWS + start + tl.arange(0, TILE), tl.sum(x * r, 1))
        tl.debug_barrier()  # all stores of this program come before its arrival
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            j = tl.arange(0, ROWS)
            s = tl.zeros([ROWS], tl.float64)
            for first in range(0, tl.num_programs(0), 64):
                part = first + tl.arange(0, 64)[:, None]
                there = part < tl.num_programs(0)
                some = tl.load(dots + part * ROWS + j[None, :], mask=there, other=0.0, cache_modifier=".cg")
                s += tl.sum(some.to(tl.float64), 0)
            sign_loop(grams + block * ROWS * ROWS, ROWS, s, thresholds, decided, block * ROWS, count, ROWS)

"""Triton kernels for rows on a GPU: a table, its signs and the new running sum, without waiting for the host.

Rows are read twice and nothing of their size is written: once for the table, once for the running sum. Both passes run
at the speed of memory. Every kernel has a twin in plain PyTorch (`tables.py`), which serves where Triton is missing.

Sums are formed in a fixed order, never with atomics, so that a run can be repeated bit for bit.
"""

# The inside of a kernel is Triton's language, which only looks like Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balancing.tables import HUGE_ON_GPU

_FEW_ROWS = 16  # up to here every pair of rows has an accumulator of its own
_LEAST_ROWS = 8  # up to here they leave registers for other kernels
_PROGRAMS = 528  # four for each multiprocessor of a large GPU
_STEP_COLUMNS = 256
_BLOCK = 64


class Rows(NamedTuple):
    """Where row `n` begins: at visit `n // num_lanes` and lane `n % num_lanes`."""

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


def table(rows_KD: Tensor, minus_KD: Tensor | None, running_sum_D: Tensor, *, in_place: bool) -> Tensor:
    """As `tables.table`; `in_place` puts the differences in the place of `rows_KD`."""
    num_rows, dim = rows_KD.shape
    few, programs, stages = num_rows <= _FEW_ROWS, _PROGRAMS, 1
    if num_rows <= _LEAST_ROWS and dim < HUGE_ON_GPU:
        # Few programs, with the columns to come on their way: nearly as fast as many, and matrix products that run
        # beside them find room. Eight rows and as many to subtract take one for each multiprocessor; fewer take more,
        # so that as many numbers are on their way.
        padded, columns, warps, stages = num_rows, 256, 8, 3
        programs = 4 * _PROGRAMS // (num_rows if minus_KD is None else 2 * num_rows)
    elif few:
        padded, columns, warps = num_rows, 512 if num_rows <= _LEAST_ROWS else 256 if num_rows <= 12 else 128, 4
    else:
        padded, columns, warps = triton.next_power_of_2(num_rows), 32, 2
    width = math.ceil(dim / (programs * columns)) * columns
    programs = math.ceil(dim / width)
    partial_PKK1 = rows_KD.new_empty(programs, num_rows, num_rows + 1)
    minus = rows_KD if minus_KD is None else minus_KD
    kernel = _few_rows if few else _many_rows
    kernel[(programs,)](
        rows_KD,
        minus,
        running_sum_D,
        partial_PKK1,
        num_rows,
        dim,
        rows_KD.stride(0),
        minus.stride(0),
        width,
        ROWS=padded,
        COLUMNS=columns,
        SUBTRACT=minus_KD is not None,
        IN_PLACE=in_place,
        num_warps=warps,
        **({"STAGES": stages} if few else {"num_stages": 1, "PRECISION": precision(rows_KD.device)}),
    )
    return partial_PKK1.sum(0, dtype=torch.float64)


def decide(table_KK1: Tensor, thresholds_K: Tensor) -> Tensor:
    """As `tables.decide`, in a single warp."""
    num_rows = len(table_KK1)
    decided_4K = torch.empty(4, num_rows, dtype=torch.float64, device=table_KK1.device)
    rows = max(4, triton.next_power_of_2(num_rows))
    _decide[(1,)](table_KK1.contiguous(), thresholds_K, decided_4K, num_rows, ROWS=rows, num_warps=1)
    return decided_4K


def balance_blocks(rows: Rows, minus: Rows, running_sum_D: Tensor, thresholds_N: Tensor) -> Tensor:
    """Decide the signs of the rows `rows - minus`, block by block, and add them to the running sum.

    The Gram matrices of all blocks are known before the first sign. What remains for a block are its inner products
    with the running sum. One launch adds the block before, finds them, and decides the signs.

    Returns:
        `4 x N`, as `tables.decide`.
    """
    count, dim, device = rows.count, running_sum_D.numel(), running_sum_D.device
    num_blocks = math.ceil(count / _BLOCK)
    columns = 64
    programs = max(1, min(math.ceil(2 * _PROGRAMS / num_blocks), math.ceil(dim / columns)))
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


def advance(running_sum_D: Tensor, rows_KD: Tensor, minus_KD: Tensor | None, weights_K: Tensor) -> None:
    """As `tables.advance`."""
    num_rows, dim = rows_KD.shape
    minus = rows_KD if minus_KD is None else minus_KD
    _advance[(triton.cdiv(dim, 1024),)](
        running_sum_D,
        rows_KD,
        minus,
        weights_K,
        num_rows,
        dim,
        rows_KD.stride(0),
        minus.stride(0),
        COLUMNS=1024,
        SUBTRACT=minus_KD is not None,
        num_warps=4,
    )


@functools.cache
def precision(device: torch.device) -> str:
    """How Gram matrices are multiplied.

    Tensor cores multiply numbers that were split in three parts ("tf32x3"): as exact as single precision (3.5e-7 of the
    largest entry against 2.7e-7, for 62,006 columns), in half of its time.
    """
    return "tf32x3" if torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


@triton.jit
def _few_rows(
    rows,
    minus,
    running_sum,
    partial,
    num_rows,  # noqa: ARG001
    dim,
    row_stride,
    minus_stride,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every program takes `width` columns. A thread keeps all its products in registers until the end."""
    program = tl.program_id(0).to(tl.int64)
    wide = program * 0  # how far it is to the last row takes more than 32 bits
    begin = program * width
    end = tl.minimum(begin + width, dim)
    products = ()
    for _ in tl.static_range(ROWS * (ROWS + 1) // 2 + ROWS):
        products = products + (tl.zeros([COLUMNS], tl.float32),)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        r = tl.load(running_sum + column, mask=inside, other=0.0)
        d = ()
        for k in tl.static_range(ROWS):
            x = tl.load(rows + (wide + k) * row_stride + column, mask=inside, other=0.0)
            if SUBTRACT:
                x -= tl.load(minus + (wide + k) * minus_stride + column, mask=inside, other=0.0)
            if IN_PLACE:
                tl.store(rows + (wide + k) * row_stride + column, x, mask=inside)
            d = d + (x,)
        added = ()
        for k in tl.static_range(ROWS):
            for j in tl.static_range(k + 1):
                added = added + (products[k * (k + 1) // 2 + j] + d[k] * d[j],)
        for k in tl.static_range(ROWS):
            added = added + (products[ROWS * (ROWS + 1) // 2 + k] + d[k] * r,)
        products = added
    out = partial + program * ROWS * (ROWS + 1)
    for k in tl.static_range(ROWS):
        for j in tl.static_range(k + 1):
            product = tl.sum(products[k * (k + 1) // 2 + j])
            tl.store(out + k * (ROWS + 1) + j, product)
            tl.store(out + j * (ROWS + 1) + k, product)
        tl.store(out + k * (ROWS + 1) + ROWS, tl.sum(products[ROWS * (ROWS + 1) // 2 + k]))


@triton.jit
def _many_rows(
    rows,
    minus,
    running_sum,
    partial,
    num_rows,
    dim,
    row_stride,
    minus_stride,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every program takes `width` columns and multiplies small tiles."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * width
    end = tl.minimum(begin + width, dim)
    k = tl.arange(0, ROWS)
    row = k[:, None].to(tl.int64)
    gram = tl.zeros([ROWS, ROWS], tl.float32)
    dots = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < num_rows) & (column[None, :] < end)
        d = tl.load(rows + row * row_stride + column[None, :], mask=inside, other=0.0)
        if SUBTRACT:
            d -= tl.load(minus + row * minus_stride + column[None, :], mask=inside, other=0.0)
        if IN_PLACE:
            tl.store(rows + row * row_stride + column[None, :], d, mask=inside)
        r = tl.load(running_sum + column, mask=column < end, other=0.0)
        dots += d * r[None, :]
        gram += tl.dot(d, tl.trans(d), input_precision=PRECISION)
    out = partial + program * num_rows * (num_rows + 1)
    tl.store(out + row * (num_rows + 1) + k[None, :], gram, mask=(row < num_rows) & (k[None, :] < num_rows))
    tl.store(out + k * (num_rows + 1) + num_rows, tl.sum(dots, 1), mask=k < num_rows)


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
    """Gram matrices of blocks of rows; every program takes `width` columns of one block."""
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
    """Add the block before, multiply this block with the new running sum; the last program to come decides."""
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
            _sign_loop(grams + block * ROWS * ROWS, ROWS, s, thresholds, decided, block * ROWS, count, ROWS)


@triton.jit
def _decide(table, thresholds, decided, num_rows, ROWS: tl.constexpr):
    k = tl.arange(0, ROWS)
    s = tl.load(table + k * (num_rows + 1) + num_rows, mask=k < num_rows, other=0.0)
    _sign_loop(table, num_rows + 1, s, thresholds, decided, 0, num_rows, ROWS)


@triton.jit
def _sign_loop(gram, stride, s, thresholds, decided, start, count, ROWS: tl.constexpr):
    """Signs of the rows from `start` on, from their Gram matrix and their inner products `s` with the running sum."""
    k = tl.arange(0, ROWS)
    inside = start + k < count
    lengths = tl.load(gram + k * stride + k, mask=inside, other=0.0)
    finite = lengths < float("inf")
    s = tl.where(finite, s, 0.0)
    signs = tl.zeros([ROWS], tl.float64)
    num_rows = tl.minimum(ROWS, count - start)
    place = decided + 2 * count + start
    # Eight rows at a time. Whatever does not depend on signs is fetched first, so that the signs need not wait for it.
    for first in range(0, num_rows, 8):
        tl.store(place + k, s, mask=inside)
        later = inside & (k >= first + 8) & finite
        lengths_8, limits_8, rows_8, entries = (), (), (), ()
        for j in tl.static_range(8):
            there = first + j < num_rows
            lengths_8 = lengths_8 + (tl.load(gram + (first + j) * (stride + 1), mask=there, other=float("inf")),)
            limits_8 = limits_8 + (tl.load(thresholds + start + first + j, mask=there, other=0.0),)
            rows_8 = rows_8 + (tl.load(gram + (first + j) * stride + k, mask=later & there, other=0.0),)
            for i in tl.static_range(j):
                entries = entries + (tl.load(gram + (first + i) * stride + first + j, mask=there, other=0.0),)
        tl.debug_barrier()  # what was stored above can be read by everyone
        products = ()
        for j in tl.static_range(8):
            there = first + j < num_rows
            products = products + (tl.load(place + first + j, mask=there, other=0.0, cache_modifier=".cg"),)
        weights = ()
        for j in tl.static_range(8):
            product = products[j]
            for i in tl.static_range(j):
                product += tl.where(weights[i] != 0, weights[i] * entries[j * (j - 1) // 2 + i], 0.0)
            counts = lengths_8[j] < float("inf")
            sign = tl.where((product <= limits_8[j]) | (not counts), 1.0, -1.0).to(tl.float64)
            here = k == first + j
            signs = tl.where(here, sign, signs)
            s = tl.where(here & counts, product, s)
            weights = weights + (tl.where(counts, sign, 0.0).to(tl.float64),)
        for i in tl.static_range(8):
            s += tl.where(weights[i] != 0, weights[i] * rows_8[i], 0.0)
    out = decided + start + k
    tl.store(out, signs, mask=inside)
    tl.store(out + count, tl.where(finite, signs, 0.0), mask=inside)
    tl.store(out + 2 * count, s, mask=inside)
    tl.store(out + 3 * count, tl.where(finite, lengths, 0.0), mask=inside)


@triton.jit
def _advance(
    running_sum,
    rows,
    minus,
    weights,
    num_rows,
    dim,
    row_stride,
    minus_stride,
    COLUMNS: tl.constexpr,
    SUBTRACT: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    wide = program * 0
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < dim
    r = tl.load(running_sum + column, mask=inside)
    for k in range(num_rows):
        weight = tl.load(weights + k).to(tl.float32)
        counts = inside & (weight != 0)  # a row that is not finite is not even read
        x = tl.load(rows + (wide + k) * row_stride + column, mask=counts, other=0.0)
        if SUBTRACT:
            x -= tl.load(minus + (wide + k) * minus_stride + column, mask=counts, other=0.0)
        r += weight * x
    tl.store(running_sum + column, r, mask=inside)

"""Triton kernels for one block of rows on a GPU: its table, and the new running sum, without waiting for the host.

Rows are read twice, once for the table and once for the running sum; no copy of them is made. Both passes run at the
speed of memory. Every kernel has a twin in plain PyTorch (`tables.py`), which is used without Triton.

Sums are formed in a fixed order, never with atomics, so that a run can be repeated bit for bit.
"""

# Kernels are written in Triton's language, which only looks like Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balancing.tables import HUGE_ON_GPU

PROGRAMS = 528  # four for each multiprocessor of a large GPU
_FEW_ROWS = 16  # up to so many rows, every pair has an accumulator of its own
_LEAST_ROWS = 8  # up to so many rows, accumulators leave registers for other kernels


def table(rows_KD: Tensor, minus_KD: Tensor | None, running_sum_D: Tensor, *, in_place: bool) -> Tensor:
    """`tables.table`; with `in_place` the differences overwrite `rows_KD`."""
    num_rows, dim = rows_KD.shape
    few, programs, stages = num_rows <= _FEW_ROWS, PROGRAMS, 1
    if num_rows <= _LEAST_ROWS and dim < HUGE_ON_GPU:
        # Few programs that prefetch columns are nearly as fast as many, and leave room for matrix products beside them.
        # Eight rows with eight to subtract get one program per multiprocessor. Fewer rows get more programs, so that as
        # many loads are in flight.
        padded, columns, warps, stages = num_rows, 256, 8, 3
        programs = 4 * PROGRAMS // (num_rows if minus_KD is None else 2 * num_rows)
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


def advance(running_sum_D: Tensor, rows_KD: Tensor, minus_KD: Tensor | None, weights_K: Tensor) -> None:
    """`tables.advance`."""
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
    """The precision in which Gram matrices are multiplied.

    "tf32x3" splits numbers in three parts for the tensor cores. It takes half the time of single precision and is as
    exact: 3.5e-7 of the largest entry against 2.7e-7, for 62,006 columns.
    """
    if device.type == "cpu":  # in Triton's interpreter
        return "ieee"
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
    """Take `width` columns per program. A thread keeps all its products in registers until the end."""
    program = tl.program_id(0).to(tl.int64)
    wide = program * 0  # an int64 zero: the offset of the last row takes more than 32 bits
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
    """Take `width` columns per program and multiply small tiles."""
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
        # A row that is not finite is not read. Not `inside & ...`: Triton's interpreter cannot "and" a vector with a
        # scalar that comes from comparing floats. Compiled, both are the same.
        counts = tl.where(weight != 0, inside, False)
        x = tl.load(rows + (wide + k) * row_stride + column, mask=counts, other=0.0)
        if SUBTRACT:
            x -= tl.load(minus + (wide + k) * minus_stride + column, mask=counts, other=0.0)
        r += weight * x
    tl.store(running_sum + column, r, mask=inside)

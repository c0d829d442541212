"""Triton kernels for gradients of single examples on a GPU: rows of tables (embeddings), and short rows.

An example looks a token up once or several times; what belongs to one entry of the table is added up by one program, in
the order of positions, so that a run can be repeated bit for bit. PyTorch's own way to that sorts all indices first.

A short row is a sum of outer products of projected vectors. What is projected never leaves the chip, and no library for
matrix products is called, which would take 32 MiB for itself where it is recorded.
"""

# The inside of a kernel is Triton's language, which only looks like Python to a type checker.
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from cdgrab.balance.kernels import precision

_COLUMNS = 128
_MOST_PROGRAMS = 528  # four for each multiprocessor of a large GPU
_SPLIT = 2  # programs for the columns of vectors that are at least so long
_LONG = 512


def add_lookups(index_NT: Tensor, b_NTq: Tensor, place_ND: Tensor, strides: tuple[int, int]) -> None:
    """Add `b_NTq[n, t]` to entry `index_NT[n, t]` of the table that row `n` of `place_ND` is.

    `strides` are those of the table.
    """
    num, positions, width = b_NTq.shape
    _add_lookups[(num * positions, triton.cdiv(width, _COLUMNS))](
        index_NT.contiguous(),
        b_NTq.contiguous(),
        place_ND,
        positions,
        width,
        place_ND.stride(0),
        *strides,
        POSITIONS=triton.next_power_of_2(positions),
        COLUMNS=_COLUMNS,
        num_warps=1,
    )


def outer_sums(b_NTq: Tensor, left_mq: Tensor | None, a_NTp: Tensor, right_kp: Tensor | None) -> Tensor:
    """`N x m x k`: `sum_t outer(left @ b_t, right @ a_t)`. Without a projection a side is taken as it is."""
    num, positions, _ = a_NTp.shape
    m, k = (
        vectors.shape[2] if projection is None else len(projection)
        for vectors, projection in ((b_NTq, left_mq), (a_NTp, right_kp))
    )
    alone = positions == 1
    tile = min(64, max(16, triton.next_power_of_2(positions)))
    # Programs for parts of the positions, if there are too few examples.
    parts = 1 if alone else max(1, min(math.ceil(positions / tile), _MOST_PROGRAMS // num))
    length = math.ceil(positions / parts / tile) * tile
    parts = math.ceil(positions / length)
    programs = triton.cdiv(num, tile) if alone else num
    # A program goes through its columns one after the other, so the columns of long vectors are shared out, too. Then
    # they are read more than once, which many programs would feel.
    few = 2 * _SPLIT**2 * programs * parts <= _MOST_PROGRAMS
    splits = [
        _SPLIT if few and projection is not None and projection.shape[1] >= _LONG else 1
        for projection in (left_mq, right_kp)
    ]
    sums = parts * splits[0] * splits[1]
    out_SNmk = a_NTp.new_empty(sums, num, m, k)
    _outer_sums[(programs, sums)](
        b_NTq,
        b_NTq if left_mq is None else left_mq.contiguous(),
        a_NTp,
        a_NTp if right_kp is None else right_kp.contiguous(),
        out_SNmk,
        num,
        positions,
        length,
        b_NTq.shape[2],
        a_NTp.shape[2],
        m,
        k,
        *b_NTq.stride(),
        *a_NTp.stride(),
        LEFT=left_mq is not None,
        RIGHT=right_kp is not None,
        ALONE=alone,
        LEFT_SPLITS=splits[0],
        RIGHT_SPLITS=splits[1],
        TILE=tile,
        M=max(16, triton.next_power_of_2(m)),
        K=max(16, triton.next_power_of_2(k)),
        COLUMNS=64,
        PRECISION=precision(a_NTp.device),
        num_warps=4,
        num_stages=4,  # of columns on their way
    )
    return out_SNmk[0] if sums == 1 else out_SNmk.sum(0)


@triton.jit
def _outer_sums(
    b,
    left,
    a,
    right,
    out,
    num,
    positions,
    length,
    q,
    p,
    m,
    k,
    b_example,
    b_position,
    b_column,
    a_example,
    a_position,
    a_column,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ALONE: tl.constexpr,
    LEFT_SPLITS: tl.constexpr,
    RIGHT_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program takes `length` positions of an example, or of a single position each, some examples.

    Of each vector it takes a part of the columns. What all parts give adds up to the sum.
    """
    program = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1).to(tl.int64)
    part = number // (LEFT_SPLITS * RIGHT_SPLITS)
    q_part = tl.cdiv(tl.cdiv(q, LEFT_SPLITS), COLUMNS) * COLUMNS
    q_begin = number // RIGHT_SPLITS % LEFT_SPLITS * q_part
    q_end = tl.minimum(q_begin + q_part, q)
    p_part = tl.cdiv(tl.cdiv(p, RIGHT_SPLITS), COLUMNS) * COLUMNS
    p_begin = number % RIGHT_SPLITS * p_part
    p_end = tl.minimum(p_begin + p_part, p)
    i, j = tl.arange(0, M), tl.arange(0, K)
    if ALONE:
        example = program * TILE + tl.arange(0, TILE)
        inside = example < num
        here = b + example * b_example
        b_TM = _projected(here, left, q, q_begin, q_end, m, inside, b_column, LEFT, TILE, M, COLUMNS, PRECISION)
        here = a + example * a_example
        a_TK = _projected(here, right, p, p_begin, p_end, k, inside, a_column, RIGHT, TILE, K, COLUMNS, PRECISION)
        place = out + ((number * num + example[:, None, None]) * m + i[None, :, None]) * k + j[None, None, :]
        there = inside[:, None, None] & (i < m)[None, :, None] & (j < k)[None, None, :]
        tl.store(place, b_TM[:, :, None] * a_TK[:, None, :], mask=there)
    else:
        total_MK = tl.zeros([M, K], tl.float32)
        for start in range(part * length, tl.minimum((part + 1) * length, positions), TILE):
            t = start + tl.arange(0, TILE)
            inside = t < positions
            here = b + program * b_example + t * b_position
            b_TM = _projected(here, left, q, q_begin, q_end, m, inside, b_column, LEFT, TILE, M, COLUMNS, PRECISION)
            here = a + program * a_example + t * a_position
            a_TK = _projected(here, right, p, p_begin, p_end, k, inside, a_column, RIGHT, TILE, K, COLUMNS, PRECISION)
            total_MK += tl.dot(tl.trans(b_TM), a_TK, input_precision=PRECISION)
        place = out + ((number * num + program) * m + i[:, None]) * k + j[None, :]
        tl.store(place, total_MK, mask=(i < m)[:, None] & (j < k)[None, :])


@triton.jit
def _projected(
    rows,
    projection,
    width,
    begin,
    end,
    count,
    inside,
    column_stride,
    PROJECT: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`TILE x COUNT`: some vectors, shortened; of those that are projected, the columns from `begin` to `end`."""
    j = tl.arange(0, COUNT)
    if PROJECT:
        short = tl.zeros([TILE, COUNT], tl.float32)
        for start in range(begin, end, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = column < end
            x = tl.load(
                rows[:, None] + column[None, :] * column_stride, mask=inside[:, None] & there[None, :], other=0.0
            )
            directions = tl.load(
                projection + j[None, :] * width + column[:, None], mask=there[:, None] & (j < count)[None, :], other=0.0
            )
            short += tl.dot(x, directions, input_precision=PRECISION)
        return short
    else:
        mask = inside[:, None] & (j < count)[None, :]
        return tl.load(rows[:, None] + j[None, :] * column_stride, mask=mask, other=0.0)


@triton.jit
def _add_lookups(
    index,
    b,
    place,
    positions,
    width,
    row_stride,
    entry_stride,
    column_stride,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The program of an entry's first position adds all of them; the others have nothing to do."""
    program = tl.program_id(0).to(tl.int64)
    example, position = program // positions, program % positions
    index += example * positions
    b += example * positions * width
    token = tl.load(index + position).to(tl.int64)
    t = tl.arange(0, POSITIONS)
    earlier = (tl.load(index + t, mask=t < position, other=-1) == token) & (t < position)
    if tl.sum(earlier.to(tl.int32)) == 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        there = place + example * row_stride + token * entry_stride + column.to(tl.int64) * column_stride
        total = tl.load(there, mask=inside, other=0.0)
        for s in range(position, positions):
            if tl.load(index + s) == token:
                total += tl.load(b + s * width + column, mask=inside, other=0.0)
        tl.store(there, total, mask=inside)

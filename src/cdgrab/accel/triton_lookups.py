"""A Triton kernel for rows of tables (embeddings) on a GPU.

An example looks a token up once or several times. What belongs to one entry of the table is added up by one program, in
the order of positions, so that a run can be repeated bit for bit. PyTorch's own way to that sorts all indices first.
"""

# The inside of a kernel is Triton's language, which only looks like Python to a type checker.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 128


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

"""Short rows of small parameters, all of them in one call, compiled for the CPU, when numba is installed.

Shortening a bias or a small layer takes PyTorch a handful of operations, which take longer to call than to do, and a
model has many of them. Numba is imported at first use.

Shapes: `N` examples; `p` inputs and `q` outputs of a layer, of which `k` and `m` directions are kept.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdgrab.balance import compiled
from cdgrab.ghost.compiled import reader
from cdgrab.ghost.records import Matrix, Record, Rows, Summed

# Of a parameter, for all examples. More are done faster by matrix products, which use all cores; fewer take less time
# than calling these does.
MOST_MULTIPLICATIONS = 1_600_000


class Part(NamedTuple):
    """What a parameter adds to rows: `outer(left @ b, right @ a)`, or `left @ rows @ right.T`."""

    name: str
    a: Tensor  # `N x p`, or rows: `N x (q * p)`
    b: Tensor | None  # `N x q`
    right_kp: Tensor | None  # without it that side is taken as it is
    left_mq: Tensor | None
    sizes: tuple[int, int, int, int]  # p, q, k, m
    column: int  # the first of those that it goes to
    versions: tuple[int, int]  # of `a` and `b`, which are others', and must stay as they are

    @property
    def is_unchanged(self) -> bool:
        return self.versions == versions(self.a, self.b)


def versions(a: Tensor, b: Tensor | None) -> tuple[int, int]:
    """What changes when somebody changes them."""
    return a._version, 0 if b is None else b._version


def factors_of(record: Record) -> tuple[Tensor, Tensor | None] | None:
    """`a` and `b`, or rows alone, if it has them at hand."""
    if isinstance(record, Matrix):
        return (record.a_NTp[:, 0], record.b_NTq[:, 0]) if record.a_NTp.shape[1] == 1 else None
    if isinstance(record, Summed):
        return (record.vectors_NTp[:, 0], None) if record.vectors_NTp.shape[1] == 1 else None
    return (record.rows_ND, None) if isinstance(record, Rows) else None


def takes(a: Tensor, b: Tensor | None, sizes: tuple[int, int, int, int]) -> bool:
    """Whether a parameter is small enough, and where compiled code can get at it."""
    p, q, k, m = sizes
    # Somebody may have put another parameter in the place of one, and the loop would read on.
    if a.shape[1] != (q * p if b is None else p) or (b is not None and b.shape[1] != q):
        return False
    each = p * k + q * m + k * m if b is not None else q * p * k + m * q * k
    return (
        len(a) * each <= MOST_MULTIPLICATIONS
        and a.device.type == "cpu"
        and a.dtype in (torch.float32, torch.float64)
        and (b is None or b.dtype == a.dtype)
        and compiled.available()
    )


def add_short_rows(parts: list[Part], rows_ND: Tensor) -> None:
    """Add what all these parameters give, each to its own columns."""
    like = rows_ND.dtype
    tensors = [
        [None if t is None else t.to(like).contiguous() for t in (part.a, part.b, part.right_kp, part.left_mq)]
        for part in parts
    ]
    pointers = np.array([[0 if t is None else t.data_ptr() for t in four] for four in tensors], dtype=np.int64)
    sizes = np.array([(*part.sizes, part.column) for part in parts], dtype=np.int64)
    most = max(max(q * k, k + m) for _, q, k, m in (part.sizes for part in parts))
    rows = rows_ND.numpy()
    _kernel(rows.dtype.name)(pointers, sizes, rows, np.empty(most, dtype=rows.dtype))


@functools.cache
def _kernel(dtype: str) -> Callable[..., None]:
    numba: Any = importlib.import_module("numba")
    array, number, size_of_number = reader(dtype), np.dtype(dtype).type, np.dtype(dtype).itemsize

    @numba.njit(nogil=True, fastmath=compiled.REORDER)
    def shorten(vector, address, count, place):  # type: ignore[no-untyped-def]
        """`count` inner products of a vector with the rows of a matrix at `address`; without one, the vector."""
        length = vector.shape[0]
        if address == 0:
            for i in range(count):
                place[i] = vector[i]
            return
        matrix = array(address, count * length)
        for i in range(count):
            row = matrix[i * length : (i + 1) * length]
            s = number(0)
            for x in range(length):
                s += row[x] * vector[x]
            place[i] = s

    @numba.njit(nogil=True, fastmath=compiled.REORDER)
    def kernel(pointers, sizes, rows, scratch):  # type: ignore[no-untyped-def]
        for part in range(pointers.shape[0]):
            p, q, k, m, column = sizes[part]
            a_there, b_there, right, left = pointers[part]
            for example in range(rows.shape[0]):
                place = rows[example, column : column + m * k]
                if b_there != 0:
                    a = array(a_there + example * p * size_of_number, p)
                    b = array(b_there + example * q * size_of_number, q)
                    short_a, short_b = scratch[:k], scratch[k : k + m]
                    shorten(a, right, k, short_a)
                    shorten(b, left, m, short_b)
                    for j in range(m):
                        for i in range(k):
                            place[j * k + i] += short_b[j] * short_a[i]
                    continue
                for j in range(q):
                    row = array(a_there + (example * q + j) * p * size_of_number, p)
                    shorten(row, right, k, scratch[j * k : (j + 1) * k])
                if left == 0:
                    for i in range(q * k):
                        place[i] += scratch[i]
                    continue
                weights = array(left, m * q)
                for j in range(m):
                    for h in range(q):
                        weight = weights[j * q + h]
                        for i in range(k):
                            place[j * k + i] += weight * scratch[h * k + i]

    found: Callable[..., None] = kernel
    return found

"""PairBalance on the factors of small layers, compiled for the CPU, when numba is installed.

Pair by pair, as the paper has it, against a running sum that stays in cache: a pair's inner product with it takes as
many multiplications as the layers have weights, and so does adding the pair. A table of inner products among pairs, of
which all are needed but few count, takes many more. Numba is imported at first use.
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
from cdgrab.balance.rules import FloatArray
from cdgrab.ghost.records import Pair, Record, Rows

MOST_NUMBERS = 1 << 17  # of the running sum: half a megabyte, which a core keeps to itself
# What a table takes is told in multiplications. Matrix products do them two to five times as fast as the loop, on two
# cores of several machines, so that its own count this many times; calls for a matrix, or for rows, count as so many.
_FASTER = 2
_CALLS_OF_MATRIX, _CALLS_OF_ROWS = 4_000_000, 1_500_000


class _Part(NamedTuple):
    """A parameter: for every pair `outer(b, a) - outer(minus_b, minus_a)`; its running sum, with `a` along rows."""

    a: Tensor
    b: Tensor | None  # without it `a` is a row, and there is nothing to subtract
    minus_a: Tensor | None
    minus_b: Tensor | None
    running_sum: Tensor


def takes(pairs: dict[str, Record], running_sum: dict[str, Tensor]) -> bool:
    """Whether the loop knows what these pairs are made of, and is faster than a table."""
    sums = [running_sum[name] for name in pairs]
    dtype = sums[0].dtype
    return (
        sum(part.numel() for part in sums) <= MOST_NUMBERS
        and dtype in (torch.float32, torch.float64)
        and all(part.device.type == "cpu" and part.dtype == dtype for part in sums)
        and all(_is_known(record, dtype) for record in pairs.values())
        and sum(_saved(record) for record in pairs.values()) > 0
        and compiled.available()
    )


def _saved(record: Record) -> float:
    num = len(record.tensors[0])
    if isinstance(record, Pair):
        return saved_by_matrix(num, record.first.a_NTp.shape[2], record.first.b_NTq.shape[2])
    return saved_by_rows(num, record.tensors[0].shape[1])


def saved_by_matrix(num: int, p: int, q: int) -> float:
    """Multiplications that a table of `num` pairs would take for each of them, above those of the loop."""
    return 3 * num * (p + q) + _CALLS_OF_MATRIX / num - _FASTER * 4 * p * q


def saved_by_rows(num: int, dim: int) -> float:
    """The same for a parameter that has rows."""
    return num * dim + _CALLS_OF_ROWS / num - _FASTER * 2 * dim


def _is_known(record: Record, dtype: torch.dtype) -> bool:
    if isinstance(record, Pair):
        alone = record.first.a_NTp.shape[1] == 1 and record.second is not None and record.second.a_NTp.shape[1] == 1
        return alone and all(tensor.dtype == dtype for tensor in record.tensors)
    return isinstance(record, Rows) and record.rows_ND.dtype == dtype


def pair_signs(pairs: dict[str, Record], running_sum: dict[str, Tensor]) -> FloatArray:
    """Decide the signs of pairs by the greedy rule and add them to the running sum, in place.

    Returns:
        `4 x K`, as `tables.decide` does.
    """
    parts = [_part(record, running_sum[name]) for name, record in pairs.items()]
    num = len(parts[0].a)
    pointers = np.array([[_address(tensor) for tensor in part] for part in parts], dtype=np.int64)
    strides = np.array([[0 if t is None else t.stride(0) for t in part[:4]] for part in parts], dtype=np.int64)
    sizes = np.array([part.running_sum.shape for part in parts], dtype=np.int64)
    decided_4K = np.zeros((4, num))
    _kernel(parts[0].running_sum.numpy().dtype.name)(pointers, strides, sizes, decided_4K)
    for part, name in zip(parts, pairs, strict=True):
        if part.running_sum.data_ptr() != running_sum[name].data_ptr():  # it was turned
            running_sum[name].copy_(part.running_sum.T.view_as(running_sum[name]))
    return decided_4K


def _part(record: Record, running_sum: Tensor) -> _Part:
    if isinstance(record, Rows):
        return _Part(record.rows_ND.contiguous(), None, None, None, running_sum.view(1, -1))
    assert isinstance(record, Pair)
    assert record.second is not None
    a, b, minus_a, minus_b = (tensor[:, 0].contiguous() for tensor in record.tensors)
    r_qp = running_sum.view(b.shape[1], a.shape[1])
    if a.shape[1] < b.shape[1]:  # the loop is fast along rows, so these had better be long
        return _Part(b, a, minus_b, minus_a, r_qp.T.contiguous())
    return _Part(a, b, minus_a, minus_b, r_qp)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def reader(dtype: str) -> Any:
    """For compiled code: from an address, and a count of numbers, to the array that is there."""
    numba: Any = importlib.import_module("numba")
    carray = numba.carray
    pointer = numba.types.CPointer(numba.from_dtype(np.dtype(dtype)))

    def typed(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return pointer(numba.types.int64), code

    at: Any = importlib.import_module("numba.extending").intrinsic(typed)

    @numba.njit(nogil=True, inline="always")
    def array(address, count):  # type: ignore[no-untyped-def]
        return carray(at(address), count)

    return array


@functools.cache
def _kernel(dtype: str) -> Callable[..., None]:
    numba: Any = importlib.import_module("numba")
    array, number, size_of_number = reader(dtype), np.dtype(dtype).type, np.dtype(dtype).itemsize

    @numba.njit(nogil=True, inline="always")
    def vector(pointers, strides, part, which, pair, count):  # type: ignore[no-untyped-def]
        """`count` numbers of a pair: of `a`, `b`, `minus_a` or `minus_b`."""
        return array(pointers[part, which] + pair * strides[part, which] * size_of_number, count)

    @numba.njit(nogil=True, fastmath=compiled.REORDER)
    def kernel(pointers, strides, sizes, decided):  # type: ignore[no-untyped-def]
        zero, one = number(0), number(1)
        for pair in range(decided.shape[1]):
            s = length = 0.0
            for part in range(pointers.shape[0]):
                outs, ins = sizes[part]
                a = vector(pointers, strides, part, 0, pair, ins)
                r = array(pointers[part, 4], outs * ins)
                if pointers[part, 1] == 0:
                    dot = aa = zero
                    for i in range(ins):
                        dot += r[i] * a[i]
                        aa += a[i] * a[i]
                    s += dot
                    length += aa
                    continue
                b = vector(pointers, strides, part, 1, pair, outs)
                minus_a = vector(pointers, strides, part, 2, pair, ins)
                minus_b = vector(pointers, strides, part, 3, pair, outs)
                aa = am = mm = zero
                for i in range(ins):
                    aa += a[i] * a[i]
                    am += a[i] * minus_a[i]
                    mm += minus_a[i] * minus_a[i]
                bb = bn = nn = total = zero
                for j in range(outs):
                    row = r[j * ins : (j + 1) * ins]
                    dot = minus_dot = zero
                    for i in range(ins):
                        dot += row[i] * a[i]
                        minus_dot += row[i] * minus_a[i]
                    total += b[j] * dot - minus_b[j] * minus_dot
                    bb += b[j] * b[j]
                    bn += b[j] * minus_b[j]
                    nn += minus_b[j] * minus_b[j]
                s += total
                length += float(aa) * bb + float(mm) * nn - 2.0 * float(am) * bn
            decided[0, pair] = 1.0
            if not length < np.inf:
                continue
            sign = one if s <= 0.0 else -one
            decided[0, pair], decided[1, pair] = sign, sign
            decided[2, pair], decided[3, pair] = s, max(length, 0.0)
            for part in range(pointers.shape[0]):
                outs, ins = sizes[part]
                a = vector(pointers, strides, part, 0, pair, ins)
                r = array(pointers[part, 4], outs * ins)
                if pointers[part, 1] == 0:
                    for i in range(ins):
                        r[i] += sign * a[i]
                    continue
                b = vector(pointers, strides, part, 1, pair, outs)
                minus_a = vector(pointers, strides, part, 2, pair, ins)
                minus_b = vector(pointers, strides, part, 3, pair, outs)
                for j in range(outs):
                    row = r[j * ins : (j + 1) * ins]
                    plus, minus = sign * b[j], sign * minus_b[j]
                    for i in range(ins):
                        row[i] += plus * a[i] - minus * minus_a[i]

    found: Callable[..., None] = kernel
    return found

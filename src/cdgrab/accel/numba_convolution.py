"""Rows of convolutions, compiled for the CPU, when numba is installed.

A filter's gradient at one place of its window is the inner product of an output gradient with the input, shifted by
that place. With its lines as far apart as those of the input, an output gradient is one long vector, and so are all the
shifted inputs, which overlap: nothing is copied for them. That is as fast as finding the gradient of the whole batch.
Lines are padded with zeros, and zero times a non-finite number is not zero: a non-finite entry may contaminate other
entries of its row. Numba is imported at first use.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.lanes import IntArray

_STRETCH = 2048  # positions at a time, so that all channels of an output gradient stay in cache
_WHOLE = 32  # positions, so many of which are multiplied together: what is shorter is filled up with zeros


def takes(x: Tensor, grad: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the loop knows a convolution with these inputs and output gradients."""
    return (
        all(step == 1 for step in stride)
        and x.device.type == "cpu"
        and x.dtype == grad.dtype
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() > 0
        and grad.numel() > 0
        and compiled.available()
    )


def rows(
    x: Tensor, grad: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """`N x (q * p)`: the gradients of a convolution's weight, from its inputs `N x c x H x W` and output gradients."""
    num, channels, height, width = x.shape
    outputs, lines, columns = grad.shape[1:]
    height, width = height + 2 * padding[0], width + 2 * padding[1]
    shifts_p = _shifts(channels, height, width, kernel, dilation)
    reach = (lines - 1) * width + columns
    length = -(-reach // _WHOLE) * _WHOLE
    threads = min(num, torch.get_num_threads())
    parallel = threads > 1 and compiled.use_threads(threads)
    # Of each thread: an input with zeros around it, output gradients with as long lines, and what comes of both.
    even = outputs + outputs % 2
    wide = x.new_zeros(threads, channels * height * width + length - reach)
    b, found = x.new_zeros(threads, even, length), x.new_empty(threads, even, len(shifts_p))
    rows_Nqp = x.new_empty(num, outputs, channels * math.prod(kernel))
    with compiled.in_turn(parallel):
        _kernel(parallel)(
            x.contiguous().numpy(),
            grad.contiguous().numpy(),
            shifts_p,
            (height, width, padding[0], padding[1]),
            wide.numpy(),
            b.numpy(),
            found.numpy(),
            rows_Nqp.numpy(),
        )
    return rows_Nqp.flatten(1)


@functools.lru_cache(maxsize=64)
def _shifts(channels: int, height: int, width: int, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> IntArray:
    """How far into an example each place of the window begins; the last of them fills up what is taken by fours."""
    across = np.add.outer(np.arange(kernel[0]) * dilation[0] * width, np.arange(kernel[1]) * dilation[1])
    found: IntArray = np.add.outer(np.arange(channels) * height * width, across).reshape(-1)
    return np.pad(found, (0, -len(found) % 4), mode="edge")


@functools.cache
def _kernel(parallel: bool) -> Callable[..., None]:
    numba: Any = importlib.import_module("numba")
    span = numba.prange if parallel else range

    # Written out in single numbers: assignments of whole stretches would take seconds to compile.
    @numba.njit(parallel=parallel, nogil=True, fastmath=compiled.REORDER)
    def kernel(x, grad, shifts, sizes, wide, b, found, rows):  # type: ignore[no-untyped-def]
        """Two outputs at four places at a time: what has been loaded is used for all eight products."""
        num, outputs, lines, columns = grad.shape
        height, width, above, left = sizes
        zero, threads, length = rows.dtype.type(0), wide.shape[0], b.shape[2]
        for thread in span(threads):
            mine = wide[thread]
            for example in range(thread, num, threads):
                for channel in range(x.shape[1]):
                    for line in range(x.shape[2]):
                        at = (channel * height + above + line) * width + left
                        there, here = mine[at:], x[example, channel, line]
                        for i in range(x.shape[3]):
                            there[i] = here[i]
                for output in range(outputs):
                    for line in range(lines):
                        there, here = b[thread, output, line * width :], grad[example, output, line]
                        for i in range(columns):
                            there[i] = here[i]
                for start in range(0, length, _STRETCH):
                    count = min(_STRETCH, length - start)
                    for p in range(0, shifts.shape[0], 4):
                        a, a1 = mine[shifts[p] + start :], mine[shifts[p + 1] + start :]
                        a2, a3 = mine[shifts[p + 2] + start :], mine[shifts[p + 3] + start :]
                        for q in range(0, b.shape[1], 2):
                            b0, b1 = b[thread, q, start:], b[thread, q + 1, start:]
                            s = s1 = s2 = s3 = t = t1 = t2 = t3 = zero
                            for i in range(count):
                                s += b0[i] * a[i]
                                s1 += b0[i] * a1[i]
                                s2 += b0[i] * a2[i]
                                s3 += b0[i] * a3[i]
                                t += b1[i] * a[i]
                                t1 += b1[i] * a1[i]
                                t2 += b1[i] * a2[i]
                                t3 += b1[i] * a3[i]
                            first, second = found[thread, q, p:], found[thread, q + 1, p:]
                            if start == 0:
                                for i in range(4):
                                    first[i] = second[i] = zero
                            first[0] += s
                            first[1] += s1
                            first[2] += s2
                            first[3] += s3
                            second[0] += t
                            second[1] += t1
                            second[2] += t2
                            second[3] += t3
                for output in range(outputs):
                    for place in range(rows.shape[2]):
                        rows[example, output, place] = found[thread, output, place]

    compiled_kernel: Callable[..., None] = kernel
    return compiled_kernel

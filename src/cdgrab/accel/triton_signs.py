"""Triton kernels that decide signs, from a Gram matrix and inner products with the running sum."""

# Kernels are written in Triton's language, which only looks like Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def decide(table_KK1: Tensor, thresholds_K: Tensor) -> Tensor:
    """`tables.decide` from thresholds, in a single warp."""
    num_rows = len(table_KK1)
    decided_4K = torch.empty(4, num_rows, dtype=torch.float64, device=table_KK1.device)
    rows = max(4, triton.next_power_of_2(num_rows))
    _decide[(1,)](table_KK1.contiguous(), thresholds_K, decided_4K, num_rows, ROWS=rows, num_warps=1)
    return decided_4K


@triton.jit
def _decide(table, thresholds, decided, num_rows, ROWS: tl.constexpr):
    k = tl.arange(0, ROWS)
    s = tl.load(table + k * (num_rows + 1) + num_rows, mask=k < num_rows, other=0.0)
    sign_loop(table, num_rows + 1, s, thresholds, decided, 0, num_rows, ROWS)


@triton.jit
def sign_loop(gram, stride, s, thresholds, decided, start, count, ROWS: tl.constexpr):
    """Decide the rows from `start` on, from their Gram matrix and their inner products `s` with the running sum."""
    k = tl.arange(0, ROWS)
    inside = start + k < count
    lengths = tl.load(gram + k * stride + k, mask=inside, other=0.0)
    finite = lengths < float("inf")
    s = tl.where(finite, s, 0.0)
    signs = tl.zeros([ROWS], tl.float64)
    num_rows = tl.minimum(ROWS, count - start)
    place = decided + 2 * count + start
    # Eight rows at a time. What does not depend on signs is loaded first, so that the signs need not wait for it.
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
        tl.debug_barrier()  # what was stored above can be read by every thread
        products = ()
        for j in tl.static_range(8):
            there = first + j < num_rows
            products = products + (tl.load(place + first + j, mask=there, other=0.0, cache_modifier=".cg"),)
        tl.debug_barrier()  # and has been read before any of it is stored again
        weights = ()
        for j in tl.static_range(8):
            product = products[j]
            for i in tl.static_range(j):
                product += tl.where(weights[i] != 0, weights[i] * entries[j * (j - 1) // 2 + i], 0.0)
            counts = lengths_8[j] < float("inf")
            sign = tl.where((product <= limits_8[j]) | (not counts), 1.0, -1.0).to(tl.float64)
            here = k == first + j
            signs = tl.where(here, sign, signs)
            s = tl.where(tl.where(counts, here, False), product, s)  # not `here & counts`: see `_advance`
            weights = weights + (tl.where(counts, sign, 0.0).to(tl.float64),)
        for i in tl.static_range(8):
            s += tl.where(weights[i] != 0, weights[i] * rows_8[i], 0.0)
    out = decided + start + k
    tl.store(out, signs, mask=inside)
    tl.store(out + count, tl.where(finite, signs, 0.0), mask=inside)
    tl.store(out + 2 * count, s, mask=inside)
    tl.store(out + 3 * count, tl.where(finite, lengths, 0.0), mask=inside)

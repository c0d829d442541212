"""Named inputs that several tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def low_rank(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    return randn(num_rows, 2, seed=seed) @ randn(2, dim, seed=seed + 1)


def heavy_tailed(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    return randn(num_rows, dim, seed=seed) * randn(num_rows, 1, seed=seed + 1).exp().pow(3)


def identical(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    return randn(1, dim, seed=seed).repeat(num_rows, 1)


def one_dominates(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    rows = randn(num_rows, dim, seed=seed)
    rows[::4] *= 1e4
    return rows


def with_zeros(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    rows = randn(num_rows, dim, seed=seed)
    rows[::3] = 0
    return rows


ROWS = {
    "random": lambda n, d, seed=0: randn(n, d, seed=seed),
    "low rank": low_rank,
    "heavy tails": heavy_tailed,
    "identical": identical,
    "one dominates": one_dominates,
    "with zeros": with_zeros,
}

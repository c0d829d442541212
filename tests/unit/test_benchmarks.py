"""What the benchmarks compare decides the same signs; a benchmark of two different things is worth nothing."""

from __future__ import annotations

import pytest
import torch
from benchmarks.sorter import blocked, loop, new_sorter

from _inputs import randn


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("num_workers", "dim"), [(3, 7), (2, 40_000)])
def test_the_sorter_and_the_loop_agree(fast: bool, num_workers: int, dim: int) -> None:
    rows_UWD = randn(12, num_workers, dim, dtype=torch.float32)
    assert blocked(new_sorter(num_workers), rows_UWD, fast=fast).tolist() == loop(rows_UWD)

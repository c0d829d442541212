"""Rows of convolutions, compiled, against those that autograd finds example by example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _inputs import randn
from cdgrab.accel import numba_convolution
from cdgrab.per_example.layers import adapter_of

pytest.importorskip("numba")

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "as in lenet": ({"in_channels": 3, "out_channels": 6, "kernel_size": 5}, (12, 12)),
    "odd numbers": ({"in_channels": 1, "out_channels": 3, "kernel_size": (2, 1)}, (5, 4)),
    "one output": ({"in_channels": 2, "out_channels": 1, "kernel_size": 3}, (3, 3)),
    "padding": ({"in_channels": 2, "out_channels": 4, "kernel_size": (3, 5), "padding": (1, 3)}, (4, 7)),
    "dilation": ({"in_channels": 3, "out_channels": 4, "kernel_size": 3, "dilation": (2, 1)}, (9, 6)),
    "both": ({"in_channels": 2, "out_channels": 5, "kernel_size": 3, "dilation": 2, "padding": 2}, (6, 5)),
    "several stretches": ({"in_channels": 2, "out_channels": 3, "kernel_size": 3}, (70, 90)),
}


def one_by_one(module: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    weight = module.get_parameter("weight")
    rows = [torch.autograd.grad(module(x[i : i + 1]), weight, grad[i : i + 1])[0] for i in range(len(x))]
    return torch.stack(rows).flatten(1)


def found(module: Any, x: Tensor, grad: Tensor) -> Tensor:
    record: Any = adapter_of(module).factors(module, x, grad, len(x))["weight"]
    assert numba_convolution.takes(record.x, record.grad, record.geometry.stride)
    geometry = record.geometry
    return numba_convolution.rows(record.x, record.grad, geometry.kernel, geometry.dilation, geometry.padding)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_rows_in_two_dimensions(case: str, threads: int) -> None:
    options, sizes = CASES[case]
    torch.manual_seed(0)
    module = nn.Conv2d(**options).double()
    x = randn(7, options["in_channels"], *sizes, dtype=torch.float64)
    grad = randn(*module(x).shape, seed=1, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = found(module, x, grad)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(rows, one_by_one(module, x, grad), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_in_one_dimension_and_of_any_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Conv1d(4, 3, 3, padding=2, dilation=2).to(dtype)
    x = randn(11, 5, 4, dtype=dtype).permute(1, 2, 0)
    grad = randn(*module(x).shape[::-1], seed=1, dtype=dtype).permute(2, 1, 0)
    torch.testing.assert_close(found(module, x, grad), one_by_one(module, x, grad))


def test_what_is_not_finite_stays_with_its_example() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(2, 3, 3, padding=1)
    x, grad = randn(5, 2, 6, 6), randn(5, 3, 6, 6, seed=1)
    expected = found(module, x, grad)
    x[1, 0, 2, 2], grad[3, 1, 5, 5] = torch.nan, torch.inf
    rows = found(module, x, grad)
    assert rows.isfinite().all(1).tolist() == [True, False, True, False, True]
    assert torch.equal(rows[::2], expected[::2])


def test_others_are_left_to_others() -> None:
    x, grad = randn(2, 3, 8, 8), randn(2, 4, 6, 6)
    assert numba_convolution.takes(x, grad, (1, 1))
    assert not numba_convolution.takes(x, grad, (2, 1))
    assert not numba_convolution.takes(x.half(), grad.half(), (1, 1))
    assert not numba_convolution.takes(x.double(), grad, (1, 1))
    assert not numba_convolution.takes(x[:0], grad[:0], (1, 1))
    assert not numba_convolution.takes(x.to("meta"), grad.to("meta"), (1, 1))

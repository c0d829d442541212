"""Tables, the signs they give and the running sum they lead to, in every way there is, against the plain definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from _inputs import ROWS, randn
from _tables import definition, margin
from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing import tables
from cdgrab.balancing.blocked import block_signs
from cdgrab.balancing.rules import Greedy, Rule, Walk

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])]


@pytest.mark.parametrize("engine", ["compiled", "plain"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 8, 9, 13, 17, 33, 64, 70])
@pytest.mark.parametrize("dim", [1, 7, 2049, 40_001])
def test_difference_table(engine: str, device: str, num_rows: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "available", lambda: engine == "compiled")
    monkeypatch.setattr(tables, "_has_triton", lambda: engine == "compiled")
    first, second = (randn(num_rows, dim, seed=seed).to(device) for seed in (0, 1))
    running_sum = randn(dim, seed=2).to(device) / dim**0.5
    difference = first - second
    expected = definition(difference, running_sum)
    for found in (
        tables.table(first, second, running_sum),
        tables.table(difference, None, running_sum),
        tables.difference_table(first, second, running_sum),
    ):
        assert found.dtype == torch.float64
        assert ((found.cpu() - expected).abs() <= margin(expected, dim)).all()
    assert torch.equal(first, difference)


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_and_strides(device: str) -> None:
    first, second = randn(4, 100).to(device), randn(4, 100, seed=1).to(device, torch.bfloat16)
    running_sum = randn(100, seed=2).to(device)
    expected = definition(first - second, running_sum)
    assert ((tables.difference_table(first, second, running_sum).cpu() - expected).abs() < 1e-3).all()
    first, second = randn(4, 2, 100).to(device)[:, 0], randn(4, 2, 100).to(device)[:, 1]
    expected = definition(first - second, running_sum)
    assert ((tables.table(first, second, running_sum).cpu() - expected).abs() < 1e-3).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("kind", ROWS)
def test_signs_are_those_of_the_loop(device: str, triton: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_has_triton", lambda: triton and device == "cuda")
    rows = ROWS[kind](37, 20, 5).double()
    table = definition(rows, randn(20, seed=9))
    thresholds = Walk(np.random.default_rng(3), c=4.0).thresholds(37, lambda: np.zeros(0))
    expected, s = block_signs(table[:, :-1].numpy(), table[:, -1].numpy(), thresholds)
    decided = tables.decide(table.to(device), Walk(np.random.default_rng(3), c=4.0)).cpu()
    twin = tables.decide_there(table, torch.from_numpy(thresholds))
    for signs, weights, products, lengths in (decided, twin):
        np.testing.assert_array_equal(signs, expected)
        np.testing.assert_array_equal(weights, expected)
        np.testing.assert_allclose(products, s, rtol=1e-12, atol=1e-9 * float(lengths.max()))
        torch.testing.assert_close(lengths, table.diagonal())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_leaves_no_trace(device: str, bad: float) -> None:
    rows, running_sum = randn(6, 50), randn(50, seed=1)
    clean = [0, 1, 3, 4]
    rows[2, 7], rows[5, 0] = bad, -bad
    table = tables.table(rows.to(device), None, running_sum.to(device))
    signs, weights, s, lengths = decided = tables.decide(table, Greedy()).cpu()
    alone = tables.decide(tables.table(rows[clean].to(device), None, running_sum.to(device)), Greedy()).cpu()
    assert torch.equal(signs[clean], alone[0])
    torch.testing.assert_close(decided[:, clean].float(), alone.float())
    assert signs[[2, 5]].tolist() == [1, 1]
    assert [part[[2, 5]].tolist() for part in (weights, s, lengths)] == [[0, 0]] * 3
    moved = running_sum.clone().to(device)
    tables.advance(moved, rows.to(device), None, weights.to(device))
    torch.testing.assert_close(moved.cpu(), running_sum + alone[0].float() @ rows[clean])


@pytest.mark.parametrize("device", DEVICES)
def test_advance_subtracts(device: str) -> None:
    rows, minus, running_sum = randn(5, 3000), randn(5, 3000, seed=1), randn(3000, seed=2)
    weights = torch.tensor([1.0, -1, 1, 1, -1], dtype=torch.float64)
    moved = running_sum.clone().to(device)
    tables.advance(moved, rows.to(device), minus.to(device), weights.to(device))
    torch.testing.assert_close(moved.cpu(), running_sum + weights.float() @ (rows - minus))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("turns", "workers", "dim"), [(1, 3, 5), (7, 5, 1000), (3, 64, 2049), (40, 4, 19), (2, 70, 513)]
)
@pytest.mark.parametrize("rule", [Greedy, lambda: Walk(np.random.default_rng(1))])
def test_blocks_of_blocks(turns: int, workers: int, dim: int, rule: Callable[[], Rule]) -> None:
    """Many rows at once, from tensors with gaps, one of them not finite: as one row after the other in float64."""
    rows, minus = _pairs(turns, workers, dim)
    rows[0, workers // 2, dim // 2] = torch.nan
    running_sum = randn(dim, seed=4) * 0.1
    here, there = running_sum.double(), running_sum.cuda()
    decided = tables.balance_blocks(rows.cuda(), minus.cuda(), there, rule()).cpu()
    differences = (rows - minus).double().flatten(0, 1)
    lengths = differences.square().sum(1)
    finite = torch.isfinite(lengths)
    thresholds = rule().thresholds(len(lengths), lambda: torch.where(finite, lengths, 0.0).numpy())
    for k, row in enumerate(differences):
        if not finite[k]:
            assert decided[:, k].tolist() == [1, 0, 0, 0]
            continue
        s = float(here @ row)
        scale = dim * torch.finfo(torch.float32).eps * float(here.norm() * row.norm())
        assert decided[2, k] == pytest.approx(s, abs=scale + 1e-4)
        if abs(s - thresholds[k]) > scale + 1e-4:
            assert decided[0, k] == (1 if s <= thresholds[k] else -1)
        here += decided[1, k] * row
    torch.testing.assert_close(there.cpu(), here.float(), rtol=1e-4, atol=1e-4)


def _pairs(turns: int, workers: int, dim: int) -> tuple[Tensor, Tensor]:
    rows = randn(2 * turns, workers, dim + 1)[:, :, :dim]
    return rows[0::2], rows[1::2]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 5, 8, 12, 16])
def test_rows_that_keep_a_gpu_busy(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of rows of many millions, on short ones."""
    from cdgrab.accel import triton_tables as kernels

    monkeypatch.setattr(kernels, "HUGE_ON_GPU", 100)
    rows, minus, running_sum = randn(num_rows, 3001), randn(num_rows, 3001, seed=1), randn(3001, seed=2)
    expected = definition(rows - minus, running_sum)
    found = tables.table(rows.cuda(), minus.cuda(), running_sum.cuda()).cpu()
    assert ((found - expected).abs() <= margin(expected, 3001)).all()


@pytest.mark.gpu
@needs_gpu
def test_rows_that_lie_far_apart() -> None:
    """The last of 16 rows begins beyond what 32 bits can count."""
    stride = (1 << 31) // 15 + 1024
    if torch.cuda.mem_get_info()[0] < 5 * 15 * stride:
        pytest.skip("too little memory")
    rows = torch.empty(15 * stride + 512, device="cuda").as_strided((16, 512), (stride, 1))
    rows.copy_(randn(16, 512))
    running_sum = randn(512, seed=2)
    expected = definition(rows, running_sum)
    found = tables.table(rows, None, running_sum.cuda()).cpu()
    assert ((found - expected).abs() <= margin(expected, 512)).all()
    moved = running_sum.cuda()
    tables.advance(moved, rows, None, torch.ones(16, dtype=torch.float64, device="cuda"))
    torch.testing.assert_close(moved.cpu(), running_sum + rows.cpu().sum(0), rtol=1e-4, atol=1e-4)

from __future__ import annotations

import numpy as np
import pytest
import torch

from _asserts import assert_follows_the_rule
from _inputs import ROWS, randn
from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing import balancer, reference
from cdgrab.balancing.balancer import Balancer
from cdgrab.balancing.blocked import block_signs
from cdgrab.balancing.rules import Greedy


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 1), (7, 3), (64, 19), (200, 19), (130, 500), (40, 5000)])
def test_signs_follow_the_rule(name: str, num_rows: int, dim: int) -> None:
    rows = ROWS[name](num_rows, dim, seed=num_rows + dim)
    signs = Balancer(Greedy()).balance(rows)
    clear = assert_follows_the_rule(rows, signs)
    if name in ("random", "heavy tails"):
        assert clear > 0.75  # the test has teeth


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("dim", [1, 5, 19, 700])
def test_signs_equal_the_reference_in_float64(dim: int) -> None:
    g_WUD = randn(3, 40, dim, seed=dim, dtype=torch.float64)
    _, signs_WU = reference.pair_balance(g_WUD)
    diffs_KD = (g_WUD[:, 0::2] - g_WUD[:, 1::2]).transpose(0, 1).reshape(-1, dim)
    signs = Balancer(Greedy()).balance(diffs_KD)
    np.testing.assert_array_equal(signs.reshape(-1, 3).T, signs_WU[:, 0::2])


@pytest.mark.usefixtures("engine")
def test_running_sum_is_the_signed_sum() -> None:
    rows = randn(100, 30, dtype=torch.float64)
    balancer = Balancer(Greedy())
    signs = balancer.balance(rows[:37])
    signs = np.concatenate([signs, balancer.balance(rows[37:])])
    torch.testing.assert_close(balancer.running_sum, torch.from_numpy(signs.astype(float)) @ rows)


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_block_size_does_not_change_signs(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    rows = randn(150, 40, dtype=torch.float64)
    monkeypatch.setattr(compiled, "available", lambda: False)
    expected = Balancer(Greedy()).balance(rows)
    monkeypatch.setattr(balancer, "block_size", lambda rows: size)
    np.testing.assert_array_equal(Balancer(Greedy()).balance(rows), expected)


def test_block_signs_respects_thresholds() -> None:
    rows = randn(50, 12, dtype=torch.float64)
    gram, dots = (rows @ rows.T).numpy(), (rows @ rows[0]).numpy()
    thresholds = randn(50, seed=3, dtype=torch.float64).numpy() * 5
    signs, s = block_signs(gram, dots, thresholds)
    running = rows[0].clone()
    for k in range(50):
        assert s[k] == pytest.approx(float(running @ rows[k]), abs=1e-9)
        assert signs[k] == (1 if s[k] <= thresholds[k] else -1)
        running += signs[k] * rows[k]


def test_inputs_of_block_signs_are_left_alone() -> None:
    rows = randn(20, 4, dtype=torch.float64)
    gram, dots = (rows @ rows.T).numpy(), (rows @ rows[0]).numpy()
    kept = gram.copy(), dots.copy()
    block_signs(gram, dots, np.zeros(20))
    np.testing.assert_array_equal(gram, kept[0])
    np.testing.assert_array_equal(dots, kept[1])


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_nonfinite_rows_get_plus_and_leave_no_trace(bad: float) -> None:
    rows = randn(60, 10)
    damaged = torch.cat([rows[:20], torch.full((1, 10), bad), rows[20:]])
    clean, hit = Balancer(Greedy()), Balancer(Greedy())
    signs, damaged_signs = clean.balance(rows), hit.balance(damaged)
    assert damaged_signs[20] == 1
    np.testing.assert_array_equal(np.delete(damaged_signs, 20), signs)
    torch.testing.assert_close(hit.running_sum, clean.running_sum)
    assert hit.tally.settled().nonfinite == 1
    assert hit.tally.settled().max_norm2 == pytest.approx(clean.tally.settled().max_norm2, rel=1e-5)


@pytest.mark.usefixtures("engine")
def test_tally_watches_the_running_sum() -> None:
    rows = randn(80, 6, dtype=torch.float64)
    balancer = Balancer(Greedy())
    signs = torch.as_tensor(balancer.balance(rows)).double()
    norms2 = ((signs[:, None] * rows).cumsum(0) ** 2).sum(1)
    assert balancer.tally.settled().max_norm2 == pytest.approx(float(norms2.max()))
    assert balancer.tally.settled().norm2 == pytest.approx(float(norms2[-1]))
    assert balancer.tally.settled().sum_lengths == pytest.approx(float((rows**2).sum()))
    assert balancer.tally.settled().flipped == int((signs < 0).sum())


@pytest.mark.usefixtures("engine")
def test_a_new_epoch_begins_at_zero() -> None:
    rows = randn(30, 8)
    balancer = Balancer(Greedy())
    first = balancer.balance(rows)
    balancer.start_epoch(1, 30)
    np.testing.assert_array_equal(balancer.balance(rows), first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_signs_follow_the_rule_on_a_gpu() -> None:
    rows = randn(200, 300, seed=5)
    signs = torch.as_tensor(Balancer(Greedy()).balance(rows.cuda())).to("cpu", torch.int8).numpy()
    assert assert_follows_the_rule(rows, signs) > 0.75

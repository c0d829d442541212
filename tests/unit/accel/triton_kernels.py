"""Every Triton kernel beside its plain twin, interpreted: on CPU tensors, so that no GPU is needed.

`test_triton_interpreted.py` runs this file. To run it by hand:

    TRITON_INTERPRET=1 python -m pytest tests/unit/accel/triton_kernels.py

The interpreter runs one program after the other. Races, and what only the compiler would refuse, are not found here
but by the tests marked `gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from _asserts import assert_follows_the_rule
from _inputs import ROWS, randn
from _tables import definition, margin
from cdgrab.accel import triton_blocks, triton_signs, triton_tables
from cdgrab.balancing import tables
from cdgrab.balancing.blocked import block_signs
from cdgrab.balancing.rules import Greedy, Rule, Walk

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1: these tests are for the interpreter"

# NumPy, which interprets, warns of what a GPU does silently with numbers that are not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF, TOO_LONG = float("nan"), float("inf"), 1e30  # the last has no squared length in single precision


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """What `torch.empty` gives is not a number, so an entry that no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are shared out among hundreds of programs; so few of them take several stretches of columns each."""
    for module in (triton_tables, triton_blocks):
        monkeypatch.setattr(module, "PROGRAMS", 4)


def with_gaps(num_rows: int, dim: int, *, gap: int, seed: int) -> Tensor:
    """Rows that do not touch; what is between them is not a number."""
    return torch.cat([randn(num_rows, dim, seed=seed), torch.full((num_rows, gap), NAN)], dim=1)[:, :dim]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dim", [1, 1100])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 13, 17, 64])
def test_table(num_rows: int, dim: int) -> None:
    rows, minus = with_gaps(num_rows, dim, gap=3, seed=0), with_gaps(num_rows, dim, gap=8, seed=1)
    running_sum, before = randn(dim, seed=2) / dim**0.5, rows.clone()
    plain, difference = definition(rows, running_sum), rows - minus
    expected = definition(difference, running_sum)
    found = triton_tables.table(rows, None, running_sum, in_place=False)
    assert ((found - plain).abs() <= margin(plain, dim)).all()
    found = triton_tables.table(rows, minus, running_sum, in_place=False)
    assert found.dtype == torch.float64
    assert ((found - expected).abs() <= margin(expected, dim)).all()
    assert torch.equal(rows, before)
    assert torch.equal(triton_tables.table(rows, minus, running_sum, in_place=True), found)
    assert torch.equal(rows, difference)
    twin = tables._plain_table(difference, running_sum)
    assert ((found - twin).abs() <= 2 * margin(expected, dim)).all()


@pytest.mark.parametrize("num_rows", [2, 8, 16])
def test_table_of_rows_that_keep_a_gpu_busy(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of rows of many millions, and as many programs as a GPU gets."""
    monkeypatch.setattr(triton_tables, "HUGE_ON_GPU", 100)
    rows, minus, running_sum = (randn(num_rows, 600, seed=seed) for seed in (0, 1, 2))
    expected = definition(rows - minus, running_sum[0])
    found = triton_tables.table(rows, minus, running_sum[0], in_place=False)
    assert ((found - expected).abs() <= margin(expected, 600)).all()


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("num_rows", [6, 15, 20])  # in registers, a few in registers, in tiles
def test_table_of_rows_that_are_not_finite(num_rows: int) -> None:
    rows, minus, running_sum = randn(num_rows, 300), randn(num_rows, 300, seed=1), randn(300, seed=2) / 300**0.5
    rows[1, 7], rows[4, 299], minus[3, 0] = NAN, TOO_LONG, -INF
    finite = torch.ones(num_rows, dtype=torch.bool)
    finite[[1, 3, 4]] = False
    found = triton_tables.table(rows, minus, running_sum, in_place=False)
    assert torch.equal(found.diagonal() < INF, finite)
    expected = definition((rows - minus)[finite], running_sum)
    clean = found[finite][:, torch.cat([finite, torch.ones(1, dtype=torch.bool)])]
    assert ((clean - expected).abs() <= margin(expected, 300)).all()


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("num_rows", [1, 4, 5, 8, 37, 70])
def test_decide(kind: str, num_rows: int) -> None:
    rows = ROWS[kind](num_rows, 20, 5).double()
    table = definition(rows, randn(20, seed=9))
    for rule in (Greedy(), Walk(np.random.default_rng(3), c=4.0)):
        thresholds = rule.thresholds(num_rows, lambda: np.zeros(0))
        expected, s = block_signs(table[:, :-1].numpy(), table[:, -1].numpy(), thresholds)
        decided = triton_signs.decide(table, torch.from_numpy(thresholds))
        np.testing.assert_array_equal(decided[0], expected)
        np.testing.assert_array_equal(decided[1], expected)
        np.testing.assert_allclose(decided[2], s, rtol=1e-12, atol=1e-9 * float(table.diagonal().max()))
        assert torch.equal(decided[3], table.diagonal())


@pytest.mark.parametrize("bad", [[0], [2, 3, 19], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(20))], ids=len)
def test_decide_rows_that_are_not_finite(bad: list[int]) -> None:
    rows, thresholds = randn(20, 30, dtype=torch.float64), randn(20, seed=3, dtype=torch.float64)
    rows[bad, 4] = torch.tensor([NAN, INF, -INF], dtype=torch.float64).repeat(7)[: len(bad)]
    table = definition(rows, randn(30, seed=1))
    decided = triton_signs.decide(table, thresholds)
    torch.testing.assert_close(decided, tables.decide_there(table, thresholds), rtol=1e-12, atol=1e-12)
    assert (decided[0, bad] == 1).all()
    assert (decided[1:, bad] == 0).all()


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 1), (5, 1025), (9, 2500)])
@pytest.mark.parametrize("subtract", [False, True])
def test_advance(num_rows: int, dim: int, subtract: bool) -> None:
    rows, running_sum = with_gaps(num_rows, dim, gap=3, seed=0), randn(dim, seed=2)
    minus = with_gaps(num_rows, dim, gap=8, seed=1) if subtract else None
    weights = torch.ones(num_rows, dtype=torch.float64)
    weights[1::2], weights[2::3] = -1, 0
    rows[2::3, 0] = torch.tensor([NAN, INF, -INF])[: len(rows[2::3])]
    moved, twin = running_sum.clone(), running_sum.clone()
    triton_tables.advance(moved, rows, minus, weights)
    tables.advance(twin, rows, minus, weights)
    torch.testing.assert_close(moved, twin)
    differences = rows if minus is None else rows - minus
    expected = running_sum.double() + weights @ torch.where(weights[:, None] != 0, differences, 0.0).double()
    torch.testing.assert_close(moved, expected.float())


RULES: dict[str, Callable[[], Rule]] = {"greedy": Greedy, "walk": lambda: Walk(np.random.default_rng(1), c=30.0)}


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("visits", "lanes", "dim"), [(1, 1, 1), (7, 5, 300), (3, 64, 129), (33, 4, 19), (2, 70, 257)])
def test_balance_blocks(visits: int, lanes: int, dim: int, rule: str) -> None:
    both = with_gaps(2 * visits * lanes, dim, gap=1, seed=0).unflatten(0, (visits, 2, lanes))
    check_blocks(both[:, 0], both[:, 1], RULES[rule], bad=[])


@pytest.mark.parametrize("bad", [[3], [0, 63, 64, 129], list(range(64, 128))], ids=["one", "at the ends", "a block"])
def test_balance_blocks_with_rows_that_are_not_finite(bad: list[int]) -> None:
    check_blocks(randn(26, 5, 40), randn(26, 5, 40, seed=1), RULES["walk"], bad=bad)


def test_balance_blocks_subtracts_one_row_from_all() -> None:
    """As mean centring does."""
    check_blocks(randn(9, 8, 70), randn(8, 70, seed=1).expand(9, 8, 70), Greedy, bad=[])


def test_balance_blocks_of_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one to arrive adds the inner products of more than 64 others."""
    monkeypatch.setattr(triton_blocks, "_STEP_COLUMNS", 16)
    check_blocks(randn(3, 2, 1050), randn(3, 2, 1050, seed=1), Greedy, bad=[])


def check_blocks(rows: Tensor, minus: Tensor, rule: Callable[[], Rule], bad: list[int]) -> None:
    """`tables.balance_blocks` against one row after the other in float64; rows number `bad` are not finite."""
    visits, lanes, dim = rows.shape
    for k, value in zip(bad, [NAN, INF, -INF, TOO_LONG] * len(bad), strict=False):
        rows[k // lanes, k % lanes, k % dim] = value
    running_sum = randn(dim, seed=4)
    moved = running_sum.clone()
    signs, weights, s, lengths = tables.balance_blocks(rows, minus, moved, rule())
    differences = (rows - minus).flatten(0, 1)
    finite = torch.ones(visits * lanes, dtype=torch.bool)
    finite[bad] = False
    assert (signs[~finite] == 1).all()
    assert not torch.stack([weights, s, lengths])[:, ~finite].any()
    assert torch.equal(weights[finite], signs[finite])
    thresholds = rule().thresholds(visits * lanes, lambda: np.zeros(0))
    # The running sum at the beginning is like a row of its own that is added first.
    added = torch.cat([running_sum[None], differences[finite]])
    added_signs = torch.cat([torch.ones(1), signs[finite]])
    limits = np.concatenate([[0.0], thresholds[finite.numpy()]])
    assert assert_follows_the_rule(added, added_signs.numpy(), limits) > 0.9
    weighted = added_signs[:, None] * added.double()
    before = weighted.cumsum(0)[:-1]
    torch.testing.assert_close(s[finite], (before * added[1:].double()).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lengths[finite], added[1:].double().square().sum(1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(moved, weighted.sum(0).float(), rtol=1e-4, atol=1e-4)

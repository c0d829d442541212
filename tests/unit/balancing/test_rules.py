from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from _asserts import assert_follows_the_rule
from _inputs import randn
from cdgrab import ORDERS
from cdgrab.balancing import reference
from cdgrab.balancing.balancer import Balancer
from cdgrab.balancing.rules import RULES, FloatArray, Greedy, Halving, Rule, Walk, find_rule
from cdgrab.balancing.sorter import make_sorter
from cdgrab.exchange.sharded import Sharded, ShardedPairs


def pair_rows(g_WUD: torch.Tensor) -> torch.Tensor:
    return (g_WUD[:, 0::2] - g_WUD[:, 1::2]).transpose(0, 1).reshape(-1, g_WUD.shape[-1])


def test_walk_equals_the_reference() -> None:
    g_WUD = randn(2, 60, 9, dtype=torch.float64)
    draws = np.random.default_rng(7).random(60)
    _, signs_WU = reference.pair_balance(g_WUD, reference.walk(12.0, iter(draws)))
    signs = Balancer(Walk(np.random.default_rng(7), c=12.0)).balance(pair_rows(g_WUD))
    np.testing.assert_array_equal(signs.reshape(-1, 2).T, signs_WU[:, 0::2])
    assert len(set(signs)) == 2


@pytest.mark.parametrize("epoch", [0, 3])
def test_halving_equals_the_reference(epoch: int) -> None:
    g_WUD = randn(3, 50, 9, dtype=torch.float64)
    draws = 2 * np.random.default_rng(7).random(75) - 1
    sign_of = reference.halving(delta=0.3, epochs=20, epoch=epoch + 1, num_rows=75, draws=iter(draws))
    _, signs_WU = reference.pair_balance(g_WUD, sign_of)
    balancer = Balancer(Halving(np.random.default_rng(7), delta=0.3, epochs=20))
    balancer.start_epoch(epoch, 75)
    signs = balancer.balance(pair_rows(g_WUD))
    np.testing.assert_array_equal(signs.reshape(-1, 3).T, signs_WU[:, 0::2])


def test_walk_adapts_to_the_scale_of_the_rows() -> None:
    rows = randn(200, 9)
    small, large = (Balancer(Walk(np.random.default_rng(0))).balance(rows * scale) for scale in (2.0**-20, 2.0**20))
    np.testing.assert_array_equal(small, large)


def thresholds_over_epochs(make: Callable[[], Rule], lengths_EK: np.ndarray) -> np.ndarray:
    """Every epoch's in two parts, each by a rule that goes on from a saved state."""
    rule, found = make(), []
    for epoch, lengths_K in enumerate(lengths_EK):
        rule.start_epoch(epoch, len(lengths_K))
        for part in np.split(lengths_K, [25]):
            found.append(rule.thresholds(len(part), part.copy))
            state, rule = rule.state_dict(), make()
            rule.load_state_dict(state)
    return np.concatenate(found).reshape(lengths_EK.shape)


def lengths_over_epochs() -> np.ndarray:
    """Squared lengths that fall by a factor of 100 from epoch to epoch, and vary widely within one."""
    return np.asarray(np.exp(2 * randn(3, 40, dtype=torch.float64).numpy()) * 100.0 ** -np.arange(3)[:, None])


def test_halving_is_its_formula_in_every_epoch() -> None:
    lengths_EK, u_EK = lengths_over_epochs(), 2 * np.random.default_rng(7).random((3, 40)) - 1
    found_EK = thresholds_over_epochs(lambda: Halving(np.random.default_rng(7), delta=0.3, epochs=20), lengths_EK)
    for epoch in (1, 2, 3):
        v = 0.0
        for k in range(1, 41):
            b2, u = lengths_EK[epoch - 1, k - 1], u_EK[epoch - 1, k - 1]
            lam = math.log(4 / 0.3 * (1 + math.log(20)) * (1 + math.log(40)) * k * epoch)
            a = max(b2, math.sqrt(b2 * v * lam))
            v += b2 * max(0.0, 2 + (b2 - 2 * a) * v / a**2)
            assert found_EK[epoch - 1, k - 1] == pytest.approx(u * a, rel=1e-9)


def test_the_walks_constant_is_the_largest_length_of_the_epoch_so_far() -> None:
    lengths_EK, draws_EK = lengths_over_epochs(), np.random.default_rng(7).random((3, 40))
    expected = np.maximum.accumulate(lengths_EK, axis=1) * (1 - 2 * draws_EK)
    found_EK = thresholds_over_epochs(lambda: Walk(np.random.default_rng(7)), lengths_EK)
    np.testing.assert_allclose(found_EK, expected)


@pytest.mark.usefixtures("engine")
def test_rows_that_are_not_finite_have_no_length() -> None:
    rows = randn(40, 6)
    rows[[0, 7, 8], 2] = torch.tensor([torch.nan, torch.inf, 1e30])
    kept = [k for k in range(40) if k not in (0, 7, 8)]
    c = np.maximum.accumulate(rows[kept].double().square().sum(1).numpy())
    draws = np.random.default_rng(3).random(40)[kept]
    signs = np.asarray(Balancer(Walk(np.random.default_rng(3))).balance(rows))
    assert signs[[0, 7, 8]].tolist() == [1, 1, 1]
    assert assert_follows_the_rule(rows[kept], signs[kept], c * (1 - 2 * draws)) > 0.9


@pytest.mark.parametrize("name", RULES)
def test_every_rule_balances(name: str) -> None:
    rows = randn(4000, 8)
    balancer = Balancer(find_rule(name)(np.random.default_rng(0)))
    balancer.start_epoch(0, len(rows))
    balancer.balance(rows)
    random_signs = torch.randint(0, 2, (4000,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    at_random = float(((random_signs[:, None] * rows).cumsum(0) ** 2).sum(1).max())
    assert balancer.tally.settled().max_norm2 < at_random / 10


class Counting(Greedy):
    """Remembers which epoch it is said to be, how many rows were announced, and how many came."""

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        self.epoch, self.announced, self.came = epoch, num_rows, 0

    def thresholds(self, num_rows: int, lengths: Callable[[], FloatArray]) -> FloatArray:
        self.came += num_rows
        return super().thresholds(num_rows, lengths)


@pytest.mark.parametrize(
    ("order", "expected"), [("cd-grab", [11]), ("pair", [4, 4, 3]), ("grab", [25]), ("slices", [4])]
)
def test_rules_are_told_how_many_rows_an_epoch_has(order: str, expected: list[int]) -> None:
    """Nine visits; a third lane has seven of them. Slices of a lane that is alone need no other rank."""
    counts = np.arange(9)[:, None] < ([9] if order == "slices" else [9, 9, 7])
    rngs = [np.random.default_rng(0)] * 3
    sorter = ShardedPairs(1, Sharded(), Counting()) if order == "slices" else make_sorter(ORDERS[order], rngs, Counting)
    assert sorter is not None
    for epoch in (0, 1):
        sorter.start_epoch(epoch, counts.sum(0))
        sorter.add(randn(*counts.shape, 4), counts)
        sorter.close()
        rules = [rule for rule in sorter.rules if isinstance(rule, Counting)]
        assert [rule.announced for rule in rules] == [rule.came for rule in rules] == expected
        assert all(rule.epoch == epoch for rule in rules)


@pytest.mark.parametrize("name", RULES)
def test_results_do_not_depend_on_how_rows_are_cut(name: str) -> None:
    rows = randn(100, 8, dtype=torch.float64)

    def signs(sizes: list[int]) -> np.ndarray:
        balancer = Balancer(find_rule(name)(np.random.default_rng(3)))
        balancer.start_epoch(0, 100)
        return np.concatenate([balancer.balance(part) for part in rows.split(sizes)])

    np.testing.assert_array_equal(signs([100]), signs([1, 32, 7, 60]))


@pytest.mark.parametrize("name", RULES)
def test_state_resumes_in_the_middle(name: str) -> None:
    rows = randn(80, 5)

    def fresh() -> Rule:
        return find_rule(name)(np.random.default_rng(11))

    straight = Balancer(fresh())
    straight.start_epoch(2, 80)
    straight.balance(rows[:33])
    resumed = Balancer(fresh(), running_sum=straight.running_sum.clone())
    resumed.rule.load_state_dict(straight.rule.state_dict())
    np.testing.assert_array_equal(resumed.balance(rows[33:]), straight.balance(rows[33:]))


def test_thresholds_enter_the_signs() -> None:
    rows = randn(300, 6)
    draws = 1 - 2 * np.random.default_rng(5).random(300)
    signs = Balancer(Walk(np.random.default_rng(5), c=20.0)).balance(rows)
    assert assert_follows_the_rule(rows, signs, 20.0 * draws) > 0.9


@pytest.mark.parametrize("scale", [1e-90, 1e-30, 1e60])
def test_halving_does_not_mind_the_scale(scale: float) -> None:
    rows = randn(50, 4, dtype=torch.float64)
    signs = [Balancer(Halving(np.random.default_rng(0))).balance(rows * factor) for factor in (1.0, scale)]
    np.testing.assert_array_equal(signs[0], signs[1])


def test_a_rule_may_be_made_by_hand() -> None:
    assert find_rule(lambda rng: Walk(rng, c=3.0))(np.random.default_rng(0)).c == 3.0  # type: ignore[attr-defined]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown rule 'gredy'; choose one of greedy, walk, halving"):
        find_rule("gredy")
    with pytest.raises(ValueError, match="c is -1"):
        Walk(c=-1)
    with pytest.raises(ValueError, match="delta is 0"):
        Halving(delta=0)
    with pytest.raises(ValueError, match="epochs is 0"):
        Halving(epochs=0)

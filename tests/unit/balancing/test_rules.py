from __future__ import annotations

import numpy as np
import pytest
import torch

from _asserts import assert_follows_the_rule
from _inputs import randn
from cdgrab.balancing import reference
from cdgrab.balancing.balancer import Balancer
from cdgrab.balancing.rules import RULES, Halving, Rule, Walk, find_rule


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


@pytest.mark.parametrize("name", RULES)
def test_every_rule_balances(name: str) -> None:
    rows = randn(4000, 8)
    balancer = Balancer(find_rule(name)(np.random.default_rng(0)))
    balancer.start_epoch(0, len(rows))
    balancer.balance(rows)
    random_signs = torch.randint(0, 2, (4000,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    at_random = float(((random_signs[:, None] * rows).cumsum(0) ** 2).sum(1).max())
    assert balancer.tally.settled().max_norm2 < at_random / 10


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

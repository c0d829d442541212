from __future__ import annotations

import pytest
import torch

import cdgrab
from _asserts import assert_permutation
from _inputs import randn
from cdgrab import ORDERS, RULES
from cdgrab.balancing import reference


@pytest.mark.parametrize(
    ("order", "rule"),
    # Orders that need no gradients look at no rule.
    [(order, rule) for order, spec in ORDERS.items() for rule in (RULES if spec.needs_gradients else ["greedy"])],
)
@pytest.mark.parametrize(("workers", "units"), [(1, 1), (1, 8), (3, 7), (5, 2)])
def test_every_order_with_every_rule(order: str, rule: str, workers: int, units: int) -> None:
    orders = cdgrab.balance_vectors(randn(workers, units, 3), order=order, rule=rule, rounds=3)
    assert orders.shape == (workers, units)
    for row in orders:
        assert_permutation(row, range(units))


@pytest.mark.parametrize("units", [12, 13])
def test_rounds_of_cd_grab_equal_the_reference(units: int) -> None:
    g_WUD = randn(4, units, 6, dtype=torch.float64)
    visited = torch.arange(units).repeat(4, 1)
    for rounds in (1, 2, 3):
        seen = g_WUD.gather(1, visited[..., None].expand_as(g_WUD))
        visited = visited.gather(1, reference.pair_balance(seen)[0])
        torch.testing.assert_close(cdgrab.balance_vectors(g_WUD, rounds=rounds), visited)


def test_rounds_of_grab_equal_the_reference() -> None:
    g_WUD = randn(3, 11, 6, dtype=torch.float64)
    visited, mean = torch.arange(11).repeat(3, 1), torch.zeros(3, 6, dtype=torch.float64)
    for rounds in (1, 2, 3):
        seen = g_WUD.gather(1, visited[..., None].expand_as(g_WUD))
        visited = visited.gather(1, reference.mean_balance(seen, mean)[0])
        mean = g_WUD.mean(1)
        torch.testing.assert_close(cdgrab.balance_vectors(g_WUD, order="grab", rounds=rounds), visited)


@pytest.mark.parametrize(("together", "alone"), [("cd-grab", "pair"), ("grab", "id-grab")])
def test_independent_orders_are_the_coordinated_ones_of_each_worker(together: str, alone: str) -> None:
    vectors = randn(4, 20, 6)
    expected = torch.cat([cdgrab.balance_vectors(worker[None], order=together, rounds=2) for worker in vectors])
    torch.testing.assert_close(cdgrab.balance_vectors(vectors, order=alone, rounds=2), expected)


def test_pair_balance_does_not_mind_a_large_mean_and_mean_balance_does_in_its_first_round() -> None:
    vectors = randn(1, 2000, 8, dtype=torch.float64)
    offset = vectors + 1000
    assert torch.equal(cdgrab.balance_vectors(vectors), cdgrab.balance_vectors(offset))
    assert cdgrab.herding_bound(vectors, cdgrab.balance_vectors(offset, order="grab")) > cdgrab.herding_bound(
        vectors, cdgrab.balance_vectors(vectors, order="grab")
    )


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 4\); expected lanes x units x dim"):
        cdgrab.balance_vectors(randn(3, 4))
    with pytest.raises(ValueError, match=r"shape \(2, 6, 0\)"):
        cdgrab.balance_vectors(randn(2, 6, 0))
    with pytest.raises(ValueError, match="unknown rule"):
        cdgrab.balance_vectors(randn(2, 6, 1), order="rr", rule="none")

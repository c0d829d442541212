from __future__ import annotations

import numpy as np
import pytest
import torch

import cdgrab
from _asserts import assert_permutation
from _inputs import randn
from cdgrab import herding_bound
from cdgrab.orders.herding import greedy_herding


def test_bound_by_hand() -> None:
    vectors = torch.tensor([[[1.0], [1.0], [-1.0], [-1.0]], [[2.0], [-2.0], [2.0], [-2.0]]])
    # Prefix sums over both workers: 3, 2, 3, 0.
    assert herding_bound(vectors) == 3.0
    assert herding_bound(vectors, torch.tensor([[0, 2, 1, 3], [1, 0, 3, 2]])) == 1.0


def test_bound_does_not_see_a_common_offset() -> None:
    vectors = randn(3, 20, 4, dtype=torch.float64)
    assert herding_bound(vectors + 1000) == pytest.approx(herding_bound(vectors))


def test_greedy_herding_by_hand() -> None:
    assert greedy_herding([torch.tensor([[3.0], [1.0], [-1.0], [-3.0]])])[0].tolist() == [1, 2, 0, 3]
    # The longest comes before the one that would lead further away: sums of -1, 1.5, -3, 0.
    assert greedy_herding([torch.tensor([[3.0], [2.5], [-1.0], [-4.5]])])[0].tolist() == [2, 1, 3, 0]


def test_greedy_herding_leaves_out_what_is_not_finite() -> None:
    rows = randn(9, 3)
    rows[4] = torch.nan
    assert_permutation(greedy_herding([rows])[0], [0, 1, 2, 3, 5, 6, 7, 8])


def test_greedy_herding_is_a_permutation_even_where_sums_overflow() -> None:
    rows = torch.full((7, 1), 1.8e19) * torch.tensor([[1.0], [-1], [1], [-1], [1], [-1], [0.5]])
    assert_permutation(greedy_herding([rows])[0], range(7))


def test_greedy_herding_with_uneven_workers() -> None:
    herded = greedy_herding([randn(5, 3), randn(4, 3, seed=1), torch.zeros(0, 0)])
    for order, length in zip(herded, (5, 4, 0), strict=True):
        assert_permutation(order, range(length))


def test_greedy_herding_lowers_the_bound() -> None:
    vectors = randn(2, 200, 8)
    vectors -= vectors.mean(1, keepdim=True)
    orders = cdgrab.balance_vectors(vectors, order="greedy-herding")
    assert herding_bound(vectors, orders) < herding_bound(vectors) / 3


def unit_vectors(workers: int, total: int) -> torch.Tensor:
    """The paper's herding set-up: random directions of length one, centred per worker."""
    vectors = randn(total, 16, seed=workers)
    vectors = torch.nn.functional.normalize(vectors).view(workers, -1, 16)
    return vectors - vectors.mean(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [20])
def test_herding_bound_falls_and_levels_as_in_the_paper(workers: int) -> None:
    """10^6 vectors, 15 rounds. `cdgrab verify herding` does it for 5 to 100 workers."""
    vectors = unit_vectors(workers, 10**6)
    at_random = herding_bound(vectors)
    assert 200 < at_random < 600
    falling = [herding_bound(vectors, cdgrab.balance_vectors(vectors, rounds=rounds)) for rounds in (1, 2, 3)]
    assert falling[0] < 0.7 * at_random
    assert falling[1] < 0.7 * falling[0]
    assert falling[2] < 0.7 * falling[1]

    level = {
        order: herding_bound(vectors, cdgrab.balance_vectors(vectors, order=order, rounds=15))
        for order in ("cd-grab", "pair", "id-grab")
    }
    growth = np.sqrt(workers / 5)
    assert 1.9 < level["cd-grab"] < 2.9
    assert 0.6 < level["id-grab"] / (4 * growth) < 1.4  # 4 at 5 workers, 17 at 100
    assert 0.6 < level["pair"] / (6 * growth) < 1.4  # 6 at 5 workers, 24 at 100

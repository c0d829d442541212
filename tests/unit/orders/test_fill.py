from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from _asserts import assert_permutation
from cdgrab.orders.fill import by_visit, from_lanes, next_order, pair_signs


@given(st.integers(0, 50), st.integers(1, 5), st.integers(0, 9))
def test_next_order_permutes_every_lane(num_units: int, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = by_visit(from_lanes([rng.permutation(np.arange(lane, num_units, lanes)) for lane in range(lanes)]), lanes)
    units = units[rng.permutation(len(units))]  # as batches that arrive out of order; lanes may miss any visit
    found = next_order(units, rng.integers(-1, 2, units.shape).astype(np.int8))
    assert_permutation(found, range(num_units))
    np.testing.assert_array_equal(found % lanes, np.arange(num_units) % lanes)


@given(st.lists(st.sampled_from([-1, 1]), max_size=20), st.booleans(), st.integers(1, 3))
def test_pair_k_fills_the_places_k_and_u_minus_1_minus_k(signs: list[int], odd: bool, lanes: int) -> None:
    pairs = np.repeat(np.array(signs, dtype=np.int8)[:, None], lanes, axis=1)
    of_units = np.concatenate([pair_signs(pairs), np.zeros((int(odd), lanes), dtype=np.int8)])
    units = np.arange(of_units.size).reshape(of_units.shape)
    following = next_order(units, of_units).reshape(-1, lanes)
    for k, sign in enumerate(signs):
        front, back = (2 * k, 2 * k + 1) if sign > 0 else (2 * k + 1, 2 * k)
        np.testing.assert_array_equal(following[k], units[front])
        np.testing.assert_array_equal(following[len(units) - 1 - k], units[back])
    if odd:
        np.testing.assert_array_equal(following[len(signs)], units[-1])

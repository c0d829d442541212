from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from _asserts import assert_permutation
from cdgrab.orders.fill import next_order, pair_signs


@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=50))
def test_next_order_is_a_permutation(signs: list[int]) -> None:
    order = np.random.default_rng(0).permutation(len(signs)) + 100
    assert_permutation(next_order(order, np.array(signs, dtype=np.int8)), order)


@given(st.lists(st.sampled_from([-1, 1]), max_size=20), st.booleans())
def test_pair_k_fills_the_slots_k_and_u_minus_1_minus_k(signs: list[int], odd: bool) -> None:
    units = np.concatenate([pair_signs(np.array(signs, dtype=np.int8)), np.zeros(int(odd), dtype=np.int8)])
    following = next_order(np.arange(len(units)), units)
    for k, sign in enumerate(signs):
        front, back = (2 * k, 2 * k + 1) if sign > 0 else (2 * k + 1, 2 * k)
        assert following[k] == front
        assert following[len(units) - 1 - k] == back
    if odd:
        assert following[len(signs)] == len(units) - 1

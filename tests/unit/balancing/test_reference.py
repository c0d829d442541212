"""The judge is judged on cases worked out by hand."""

from __future__ import annotations

import torch

from cdgrab.balancing import reference


def test_pair_balance_by_hand() -> None:
    # Worker 0: diffs +1, +1; worker 1: diffs +1, -3; along one axis.
    # r: 0 -> s=0, + -> 1; worker 1: s=1, - -> 0; worker 0: s=0, + -> 1; worker 1: diff -3, s=-3, + -> -2.
    g_WUD = torch.tensor([[[1.0], [0.0], [1.0], [0.0]], [[2.0], [1.0], [0.0], [3.0]]])
    next_WU, signs_WU = reference.pair_balance(g_WUD)
    assert signs_WU.tolist() == [[1, -1, 1, -1], [-1, 1, 1, -1]]
    assert next_WU.tolist() == [[0, 2, 3, 1], [1, 2, 3, 0]]


def test_an_unpaired_unit_stays_in_the_middle() -> None:
    g_WUD = torch.tensor([[[1.0], [0.0], [1.0], [0.0], [9.0]]])
    next_WU, signs_WU = reference.pair_balance(g_WUD)
    assert signs_WU.tolist() == [[1, -1, -1, 1, 0]]
    assert next_WU.tolist() == [[0, 3, 4, 2, 1]]


def test_mean_balance_by_hand() -> None:
    # Centred: +1, +1, -1. r: + -> 1; s=1, - -> 0; s=0, + -> -1.
    next_WU, signs_WU = reference.mean_balance(torch.tensor([[[3.0], [3.0], [1.0]]]), torch.tensor([[2.0]]))
    assert signs_WU.tolist() == [[1, -1, 1]]
    assert next_WU.tolist() == [[0, 2, 1]]


def test_a_tie_is_plus() -> None:
    assert reference.greedy(0.0, 1.0) == 1

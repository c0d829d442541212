"""Gains on digits: what is called a gain, and that divergence is called by its name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdgrab_experiments.theory.fits import Slope
from cdgrab_experiments.theory.gain import NETWORK, SOFTMAX, Point, best, compare, epochs_until, task
from cdgrab_experiments.theory.optimisers import Sgd
from cdgrab_experiments.theory.settings import QUICK
from cdgrab_experiments.theory.watch import Watch

SMALL = replace(QUICK.gain, examples=160, epochs=3, seeds=2)


def point(low: float, high: float, ours: float = 1.0, rr: float = 1.0) -> Point:
    return Point(SOFTMAX, "SGD", 0.1, Slope((low + high) / 2, low, high), ours, rr, None, worth=1.01)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.2, 1.4, "helps"),
        (1.001, 1.005, "no difference"),
        (0.9, 1.4, "no difference"),
        (0.7, 0.9, "hurts"),
        (np.nan, np.nan, "diverged"),
        (1.0, np.inf, "diverged"),
    ],
)
def test_what_ordering_does(low: float, high: float, word: str) -> None:
    assert point(low, high).word == word


def test_the_best_step_is_each_orders_own() -> None:
    points = [point(1, 1, ours=2.0, rr=5.0), point(1, 1, ours=3.0, rr=4.0), point(1, 1, ours=np.inf, rr=np.inf)]
    assert best(points, "cd-grab") is points[0]
    assert best(points, "rr") is points[1]


def test_epochs_until_counts_from_where_the_loss_stays_below() -> None:
    assert epochs_until(np.array([9.0, 3, 5, 2]), 4.0) == 3
    assert epochs_until(np.array([9.0, 8, 7, 6]), 4.0) is None
    assert epochs_until(np.array([1.0, np.inf]), 4.0) is None


def test_a_step_far_too_large_is_called_diverged_and_the_other_is_not() -> None:
    one, other = compare(SMALL, SOFTMAX, "SGD", [1e45, 1.0], Sgd, Watch())
    assert one.word == "diverged"
    assert other.word != "diverged"
    assert other.single == pytest.approx(1.0 / 10)


def test_losses_of_the_convex_model_are_measured_from_its_minimum() -> None:
    network = task(SMALL, SOFTMAX)
    lowest = network.loss(network.minimum().float()[None])
    np.testing.assert_allclose(lowest, network.floors_S, rtol=1e-5)
    assert task(SMALL, NETWORK).floors_S == 0.0

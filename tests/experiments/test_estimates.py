"""Figures over seeds, against tables and by hand; what a difference says, at the borders of what it may say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cdgrab_experiments.estimates import Estimate, Gap, judged, seeds_needed, student_quantile

GAP = Gap(0.1, "a tenth")


def test_estimates_by_hand() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0, math.nan])
    assert estimate is not None
    assert (estimate.mean, estimate.deviation, estimate.count) == (2.0, 1.0, 3)
    assert estimate.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert Estimate.of([5.0]) == Estimate(5.0, None, None, 1)
    assert Estimate.of([math.nan]) is None


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (4, 2.7764), (10, 2.2281), (30, 2.0423), (1000, 1.9623)])
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert student_quantile(freedom) == pytest.approx(value, abs=2e-4)


@pytest.mark.parametrize(
    ("mean", "half_width", "outcome"),
    [
        (-0.05, 0.04, "gain"),
        (-0.05, 0.06, "unclear"),  # zero and the gap are both possible
        (-0.05, 0.0501, "unclear"),
        (-0.02, 0.07, "none"),  # a gain of a tenth is not
        (0.05, 0.10, "none"),
        (0.05, 0.20, "unclear"),
        (0.05, 0.01, "none"),
        (0.0, 0.0, "none"),
        (-0.05, None, "unclear"),  # one seed
        (0.05, None, "unclear"),
    ],
)
def test_what_an_interval_says(mean: float, half_width: float | None, outcome: str) -> None:
    count = 1 if half_width is None else 5
    assert judged(Estimate(mean, half_width, half_width, count), GAP, tried=count, diverged=0) == outcome


def test_without_a_gap_only_what_is_worse_is_no_gain() -> None:
    assert judged(Estimate(-0.01, 0.02, 0.02, 5), None, tried=5, diverged=0) == "unclear"
    assert judged(Estimate(0.01, 0.02, 0.02, 5), None, tried=5, diverged=0) == "unclear"
    assert judged(Estimate(0.03, 0.02, 0.02, 5), None, tried=5, diverged=0) == "none"


def test_seeds_that_diverged_count() -> None:
    lower = Estimate(-0.05, 0.04, 0.04, 4)
    assert judged(lower, GAP, tried=5, diverged=1) == "unclear"
    assert judged(None, GAP, tried=3, diverged=3) == "none"
    assert judged(None, GAP, tried=0, diverged=0) == "unknown"


@pytest.mark.parametrize(("ratio", "seeds"), [(0.5, 4), (1.0, 10), (2.0, 34), (5.0, 199)])
def test_seeds_are_those_of_the_tables_of_power(ratio: float, seeds: int) -> None:
    """Two-sided paired t-test, 5 %, power 0.8; exact numbers for small ones are one more."""
    assert seeds_needed(ratio, 1.0) == seeds
    assert seeds_needed(10 * ratio, 10.0) == seeds


def test_so_many_seeds_see_the_gap_four_times_in_five() -> None:
    rng = np.random.default_rng(0)
    seeds = seeds_needed(1.0, 0.8)
    outcomes = [
        judged(Estimate.of(draw.tolist()), Gap(0.8, ""), tried=seeds, diverged=0)
        for draw in rng.normal(-0.8, 1.0, (4000, seeds))
    ]
    assert outcomes.count("gain") / 4000 == pytest.approx(0.8, abs=0.025)
    nothing = [
        judged(Estimate.of(draw.tolist()), Gap(0.8, ""), tried=seeds, diverged=0)
        for draw in rng.normal(0.0, 1.0, (4000, seeds))
    ]
    assert nothing.count("gain") / 4000 == pytest.approx(0.025, abs=0.01)
    assert nothing.count("none") / 4000 > 0.7

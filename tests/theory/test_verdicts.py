"""Slopes are recovered from errors of known slope; verdicts say what they should, both ways."""

from __future__ import annotations

import numpy as np
import pytest

from cdgrab_experiments.theory import verdicts
from cdgrab_experiments.theory.fits import Slope, ratio_interval, tuned
from cdgrab_experiments.theory.rates import epoch_means
from cdgrab_experiments.theory.theorems import non_convex_slope, pl_slope, speedup_slope

HORIZONS = np.array([16.0, 32, 64, 128, 256, 512, 1024])


def noisy(errors_GH: np.ndarray, seeds: int = 8) -> np.ndarray:
    rng = np.random.default_rng(5)
    return errors_GH[:, None, :] * np.exp(0.1 * rng.standard_normal((len(errors_GH), seeds, errors_GH.shape[1])))


def test_tuning_finds_the_rate_of_the_theorem() -> None:
    """Errors `exp(-c step T) + step^2`, which is where the rate comes from: a slope of -2 with its logarithms."""
    steps = 2.0 ** -np.arange(0, 12, 0.25)[:, None]
    found = tuned(noisy(np.exp(-steps * HORIZONS) + 0.01 * steps**2), HORIZONS, resamples=200)
    low, high = pl_slope("cd-grab", HORIZONS)
    assert low < found.slope.value < high
    assert found.slope.low < found.slope.value < found.slope.high
    assert found.slope.high - found.slope.low < 0.2
    assert (np.diff(steps[found.best_H, 0]) < 0).all()  # longer horizons want smaller steps


def test_a_diverged_step_is_never_the_best() -> None:
    errors = noisy(np.stack([HORIZONS**-2, HORIZONS**-1]))
    errors[0, 3] = np.nan
    errors[0, 4] = 1e300
    found = tuned(errors, HORIZONS, resamples=50)
    assert (found.best_H == 1).all()
    assert found.slope.value == pytest.approx(-1, abs=0.1)


def test_epoch_means_are_over_the_epochs_of_the_horizon() -> None:
    errors = np.array([8.0, 4, 2, 1, 0])[None, None]
    np.testing.assert_allclose(epoch_means(errors, (1, 2, 4))[0, 0], [8, 6, 15 / 4])


def test_ratios_are_of_means() -> None:
    found = ratio_interval(np.array([2.0, 4.0]), np.array([1.0, 1.0]), resamples=200)
    assert (found.value, found.low, found.high) == (3.0, 2.0, 4.0)


def test_two_runs_that_diverged_have_no_ratio() -> None:
    assert np.isnan(ratio_interval(np.array([1.0, np.inf]), np.array([np.inf, 1.0]), resamples=50).value)


@pytest.mark.parametrize(
    ("low", "high", "word"), [(-2.3, -2.1, "steeper"), (-2.1, -1.9, "inside"), (-1.4, -1.2, "outside")]
)
def test_slopes_beside_theory(low: float, high: float, word: str) -> None:
    verdict = verdicts.slope_within("", Slope((low + high) / 2, low, high), -2.0, -1.5)
    assert verdict.word == word
    assert verdict.outside == (word == "outside")
    assert not verdict.failed


@pytest.mark.parametrize("guards", [True, False])
def test_limits_hold_or_do_not(guards: bool) -> None:
    good = [
        verdicts.within("", 2.5, 2.2, 2.8, guards=guards),
        verdicts.at_most("", 1.0, 2.0, guards=guards),
        verdicts.at_least("", 3.0, 2.0, guards=guards),
    ]
    bad = [
        verdicts.within("", 2.9, 2.2, 2.8, guards=guards),
        verdicts.within("", float("nan"), 2.2, 2.8, guards=guards),
        verdicts.at_most("", 3.0, 2.0, guards=guards),
        verdicts.at_most("", float("nan"), 2.0, guards=guards),
        verdicts.at_least("", 1.0, 2.0, guards=guards),
        verdicts.at_least("", float("nan"), 2.0, guards=guards),
    ]
    assert not any(verdict.failed or verdict.outside for verdict in good)
    assert all(verdict.failed == guards and verdict.outside != guards for verdict in bad)


def test_theory_as_intervals() -> None:
    assert pl_slope("with-replacement", HORIZONS)[0] == -1
    assert non_convex_slope("rr") == (-2 / 3, -2 / 3)
    assert non_convex_slope("with-replacement") == (-1 / 2, -1 / 2)
    assert speedup_slope("cd-grab", pl=True) == -2
    assert speedup_slope("rr", pl=True) == -1
    assert speedup_slope("cd-grab", pl=False) == pytest.approx(-2 / 3)

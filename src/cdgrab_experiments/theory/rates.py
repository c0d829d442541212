"""`verify rates`: the error against the number of epochs, the step size tuned at every horizon.

Shapes: `G` step sizes, `S` seeds, `H` horizons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdgrab_experiments.theory import figures, theorems, verdicts
from cdgrab_experiments.theory.descent import Problem, descend
from cdgrab_experiments.theory.fits import Array, Tuned, diverged_to_infinity, slope, tuned
from cdgrab_experiments.theory.problems.quadratic import LeastSquares
from cdgrab_experiments.theory.problems.waves import Waves
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.settings import Rates, Settings
from cdgrab_experiments.theory.theorems import Interval
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch


@dataclass(frozen=True)
class Case:
    """A problem, the steps to try, and what theory says about it.

    Attributes:
        averaged: The error at a horizon is the mean over its epochs, which is what the non-convex theorem bounds,
            rather than that of the last one.
        theory: The interval for the slope of an order.
    """

    name: str
    problem: Problem
    steps: tuple[float, ...]
    averaged: bool
    error: str
    theory: Callable[[str], Interval]


def run(settings: Settings, watch: Watch) -> Outcome:
    """Three problems, five orders."""
    r = settings.rates
    found = measure(r, watch)
    return Outcome(
        title=(
            f"{r.workers} workers with {r.units} units each (grab: one worker with all of them), "
            f"{r.horizons[0]} to {r.horizons[-1]} epochs, step tuned per horizon"
        ),
        seeds=f"0 to {r.seeds - 1}, each with its own data",
        tables=[slope_table(r, case, found) for case in cases(r)],
        verdicts=judge(r, found),
        draw=lambda path: draw(r, found, path),
        notes=[
            "Slopes of log error against log epochs; in brackets 95% intervals, from drawing seeds with replacement.",
            "`steeper`: faster than promised, which an upper bound allows. `outside`: slower than promised.",
            "In epochs all permutations share the same powers; balancing changes the constant (and see `speedup`).",
        ],
    )


def cases(r: Rates) -> list[Case]:
    """The problems, with data for every seed."""
    across_H = np.array(r.horizons, dtype=float)
    total = r.workers * r.units

    def pl(order: str) -> Interval:
        return theorems.pl_slope(order, across_H)

    least_squares = LeastSquares(r.seeds, total, r.dim, r.curvature)
    gentle = Waves(r.seeds, total, r.dim, "value", *r.gentle)
    high = Waves(r.seeds, total, r.dim, "gradient", *r.high)
    above = "error above the minimum"
    return [
        Case("least squares", least_squares, r.least_squares_steps, False, above, pl),
        Case("PL, not convex", gentle, r.gentle_steps, False, above, pl),
        Case("not convex", high, r.high_steps, True, "mean squared gradient norm", theorems.non_convex_slope),
    ]


def measure(r: Rates, watch: Watch) -> dict[tuple[str, str], Tuned]:
    """Tuned errors of every problem and order."""
    across_H = np.array(r.horizons, dtype=float)
    problems = cases(r)
    watch.begin("rates", len(problems) * len(r.orders) * r.horizons[-1])
    found = {}
    for case in problems:
        for order in r.orders:
            detail = f"{case.name}, {order}"
            errors_GSH = descend(
                case.problem,
                order,
                workers=1 if order == "grab" else r.workers,  # GraB knows one worker
                steps=case.steps,
                looks=range(r.horizons[-1] + 1) if case.averaged else r.horizons,
                tell=lambda detail=detail: watch.step(detail),  # type: ignore[misc]
            )
            if case.averaged:
                errors_GSH = epoch_means(errors_GSH, r.horizons)
            found[case.name, order] = tuned(errors_GSH, across_H, resamples=r.resamples)
    return found


def epoch_means(errors_GSM: Array, horizons: tuple[int, ...]) -> Array:
    """Errors before epoch 0, 1, ... -> their mean over the epochs of each horizon."""
    sums = np.cumsum(diverged_to_infinity(errors_GSM), axis=-1)
    return np.stack([sums[..., horizon - 1] / horizon for horizon in horizons], axis=-1)


def slope_table(r: Rates, case: Case, found: dict[tuple[str, str], Tuned]) -> Table:
    """Slopes beside theory, over all horizons and over the later half of them."""
    across_H = np.array(r.horizons, dtype=float)
    half = len(across_H) // 2
    rows = []
    for order in r.orders:
        t, (low, high) = found[case.name, order], case.theory(order)
        later = float(slope(across_H[half:], t.errors_H[half:]))
        edge = " (edge of the grid)" if {0, len(case.steps) - 1} & set(t.best_H.tolist()) else ""
        rows.append(
            [
                order,
                str(t.slope),
                f"{later:.2f}",
                f"{low:.2f} to {high:.2f}" if low < high else f"{low:.2f}",
                f"{t.errors_H[0]:.2e}",
                f"{t.errors_H[-1]:.2e}",
                f"{case.steps[t.best_H[0]]:.3g} to {case.steps[t.best_H[-1]]:.3g}{edge}",
            ]
        )
    first, last = r.horizons[0], r.horizons[-1]
    columns = [
        "order",
        "slope",
        f"from {r.horizons[half]} epochs on",
        "theory",
        f"error at {first}",
        f"error at {last}",
    ]
    return Table(f"{case.name[0].upper()}{case.name[1:]}: {case.error}", [*columns, "best steps"], rows)


def judge(r: Rates, found: dict[tuple[str, str], Tuned]) -> list[Verdict]:
    """Slopes are measurements; that balancing pays at the longest horizon is a guard."""
    results = []
    for case in cases(r):
        for order in r.orders:
            claim = f"slope of `{order}`, {case.name}"
            results.append(verdicts.slope_within(claim, found[case.name, order].slope, *case.theory(order)))
        share = found[case.name, "cd-grab"].errors_H[-1] / found[case.name, "rr"].errors_H[-1]
        claim = f"`cd-grab` / `rr` after {r.horizons[-1]} epochs, {case.name}"
        results.append(verdicts.at_most(claim, float(share), r.share_of_rr))
    return results


def draw(r: Rates, found: dict[tuple[str, str], Tuned], path: Path) -> None:
    """One panel for each problem, with a line of theory's slope beside the measured ones."""
    figure, axes = figures.panels(3)
    across_H = np.array(r.horizons, dtype=float)
    for axis, case in zip(axes, cases(r), strict=True):
        for order in r.orders:
            t = found[case.name, order]
            figures.line(axis, order, r.horizons, t.errors_H)
            figures.band(axis, order, r.horizons, t.low_H, t.high_H)
        for order, where in (("with-replacement", 1.6), ("cd-grab", 0.6)):
            low = case.theory(order)[0]
            guide = found[case.name, order].errors_H[0] * where * (across_H / across_H[0]) ** low
            name = {-2 / 3: "-2/3", -1 / 2: "-1/2"}.get(low, f"{low:.0f}")
            figures.guide(axis, f"slope {name}", across_H, guide)
        figures.dress(axis, title=case.name, across="epochs", up=case.error)
        axis.set_xticks(r.horizons, [str(horizon) for horizon in r.horizons])
    figures.legend_below(figure, axes)
    figures.save(figure, path)

"""`verify speedup`: the error against the number of workers, with the same units per worker and the same epochs.

The linear speed-up of Theorem 1: `W` workers reach in `T` epochs what one reaches in `W * T`. Without coordination the
workers' deviations add up like random ones, and half of the power is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cdgrab_experiments.theory import figures, theorems, verdicts
from cdgrab_experiments.theory.descent import Problem, descend
from cdgrab_experiments.theory.fits import Array, Tuned, slope, tuned
from cdgrab_experiments.theory.floors import floor_table, without_noise
from cdgrab_experiments.theory.problems.quadratic import LeastSquares
from cdgrab_experiments.theory.problems.waves import Waves
from cdgrab_experiments.theory.rates import epoch_means
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.settings import Settings, Speedup
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

LEAST_SQUARES, WAVES = "least squares", "not convex"
ERRORS = {LEAST_SQUARES: "error above the minimum", WAVES: "mean squared gradient norm"}

Found = dict[tuple[str, str], Tuned]


def run(settings: Settings, watch: Watch) -> Outcome:
    """Two problems, two orders, every number of workers."""
    s = settings.speedup
    found = measure(s, watch)
    limit = without_noise(s)
    beyond = found[WAVES, "cd-grab"].errors_H - limit
    workers_W = np.array(s.workers, dtype=float)
    remaining = f"{float(slope(workers_W, beyond)):.2f}" if (beyond > 0).all() else "not defined"
    return Outcome(
        title=f"{s.units} units per worker, {s.epochs} epochs, {s.workers[0]} to {s.workers[-1]} workers, step tuned",
        seeds=f"0 to {s.seeds - 1}, each with its own data",
        tables=[*(error_table(s, name, found) for name in ERRORS), floor_table(s, watch)],
        verdicts=judge(s, found),
        draw=lambda path: draw(s, found, path),
        notes=[
            "Theory's slopes are of its leading term. The non-convex bound has a second one, 1 / epochs, which no "
            "number of workers makes smaller: the step cannot grow beyond what is stable. If all units were alike, "
            f"the error would be {limit:.3g}; what `cd-grab` has above that falls with slope {remaining}.",
            "What a fixed step leaves: runs that start at the optimum, so that only their order moves them.",
        ],
    )


def grid(s: Speedup, name: str) -> tuple[float, ...]:
    """The step sizes tried on a problem."""
    return s.least_squares_steps if name == LEAST_SQUARES else s.high_steps


def measure(s: Speedup, watch: Watch) -> Found:
    """Tuned errors for every problem and order, one figure for every number of workers."""
    watch.begin("speedup", len(ERRORS) * len(s.orders) * len(s.workers) * s.epochs)
    found = {}
    for name in ERRORS:
        errors: dict[str, list[Array]] = {order: [] for order in s.orders}
        for workers in s.workers:
            problem = _problem(s, name, workers)
            for order in s.orders:
                detail = f"{name}, {workers} workers, {order}"
                errors_GSM = descend(
                    problem,
                    order,
                    workers=workers,
                    steps=grid(s, name),
                    looks=[s.epochs] if name == LEAST_SQUARES else range(s.epochs + 1),
                    tell=lambda detail=detail: watch.step(detail),  # type: ignore[misc]
                )
                errors_GS1 = errors_GSM if name == LEAST_SQUARES else epoch_means(errors_GSM, (s.epochs,))
                errors[order].append(errors_GS1)
        for order in s.orders:
            errors_GSW = np.concatenate(errors[order], axis=-1)
            found[name, order] = tuned(errors_GSW, np.array(s.workers, dtype=float), resamples=s.resamples)
    return found


def error_table(s: Speedup, name: str, found: Found) -> Table:
    """Errors at every number of workers, and slopes beside theory's."""
    shown: Sequence[int] = range(0, len(s.workers), 2)
    half = len(s.workers) // 2
    rows = []
    for order in s.orders:
        t = found[name, order]
        early = float(slope(np.array(s.workers[: half + 1], dtype=float), t.errors_H[: half + 1]))
        theory = theorems.speedup_slope(order, pl=name == LEAST_SQUARES)
        edge = " (edge of the grid)" if {0, len(grid(s, name)) - 1} & set(t.best_H.tolist()) else ""
        steps = f"{grid(s, name)[t.best_H[0]]:.3g} to {grid(s, name)[t.best_H[-1]]:.3g}{edge}"
        errors = [f"{t.errors_H[i]:.2e}" for i in shown]
        rows.append([order, *errors, str(t.slope), f"{early:.2f}", f"{theory:.2f}", steps])
    columns = ["order", *(f"W = {s.workers[i]}" for i in shown), "slope", f"up to W = {s.workers[half]}", "theory"]
    return Table(f"{name[0].upper()}{name[1:]}: {ERRORS[name]}", [*columns, "best steps"], rows)


def judge(s: Speedup, found: Found) -> list[Verdict]:
    """Slopes are measurements; that coordination pays with many workers is a guard."""
    results = []
    for name in ERRORS:
        for order in s.orders:
            theory = theorems.speedup_slope(order, pl=name == LEAST_SQUARES)
            claim = f"slope of `{order}` in W, {name}"
            results.append(verdicts.slope_within(claim, found[name, order].slope, theory, theory))
        share = found[name, "cd-grab"].errors_H[-1] / found[name, "rr"].errors_H[-1]
        limit = s.share_of_rr if name == LEAST_SQUARES else s.high_share_of_rr
        claim = f"`cd-grab` / `rr` with {s.workers[-1]} workers, {name}"
        results.append(verdicts.at_most(claim, float(share), limit))
    return results


def draw(s: Speedup, found: Found, path: Path) -> None:
    """One panel for each problem, with lines of theory's slopes."""
    figure, axes = figures.panels(2, width=5.2)
    across_W = np.array(s.workers, dtype=float)
    for axis, name in zip(axes, ERRORS, strict=True):
        for order in s.orders:
            t = found[name, order]
            figures.line(axis, order, s.workers, t.errors_H)
            figures.band(axis, order, s.workers, t.low_H, t.high_H)
        for order in ("cd-grab", "rr"):
            theory = theorems.speedup_slope(order, pl=name == LEAST_SQUARES)
            guide = found[name, order].errors_H[0] * across_W**theory
            text = f"slope {theory:.0f}" if name == LEAST_SQUARES else f"slope {theory * 3:.0f}/3"
            figures.guide(axis, text, across_W, guide)
        figures.dress(axis, title=name, across="workers", up=ERRORS[name])
        axis.set_xticks(s.workers, [str(workers) for workers in s.workers])
    figures.legend_below(figure, axes)
    figures.save(figure, path)


def _problem(s: Speedup, name: str, workers: int) -> Problem:
    if name == LEAST_SQUARES:
        return LeastSquares(s.seeds, workers * s.units, s.dim, s.curvature)
    return Waves(s.seeds, workers * s.units, s.dim, "gradient", *s.high)

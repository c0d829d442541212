"""`verify heterogeneity`: how much of the gain survives uneven splits and large differences, and what was predicted.

The bound grows with the square of `between + within`: how far the workers' mean gradients lie from the overall mean,
and how far units lie from their worker's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cdgrab_experiments.theory import figures, verdicts
from cdgrab_experiments.theory.descent import Problem, descend
from cdgrab_experiments.theory.fits import Array, Slope, diverged_to_infinity, ratio_interval
from cdgrab_experiments.theory.problems.network import Network
from cdgrab_experiments.theory.problems.quadratic import LeastSquares
from cdgrab_experiments.theory.problems.splits import clusters, split
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.settings import Heterogeneity, Settings
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

ORDERS = ("cd-grab", "rr")


@dataclass(frozen=True)
class Result:
    """One setting: tuned errors of both orders, the gain, and what the bound depends on, at the optimum."""

    name: str
    ours: float
    rr: float
    gain: Slope
    between: float
    within: float
    steps: str


def run(settings: Settings, watch: Watch) -> Outcome:
    """Splits of one data set from random to sorted; then least squares with ever larger differences."""
    h = settings.heterogeneity
    watch.begin("heterogeneity", (len(h.strengths) + len(h.sizes)) * len(ORDERS) * h.epochs)
    splits = [split_result(h, strength, watch) for strength in h.strengths]
    sizes = [size_result(h, size, watch) for size in h.sizes]
    first = f"softmax regression on {h.classes} clusters"
    return Outcome(
        title=f"{h.workers} workers with {h.units} units each, {h.epochs} epochs, step tuned: {first}; least squares",
        seeds=f"0 to {h.seeds - 1}, each with its own data",
        tables=[
            result_table(f"Splits: {first}", "split", splits),
            result_table("Size of the differences: least squares", "differences", sizes),
        ],
        verdicts=judge(h, splits, sizes),
        draw=lambda path: draw(splits, sizes, path),
        notes=[
            "Gain: error of `rr` over error of `cd-grab`, each with its own best step; in brackets 95% intervals.",
            "`between`: the largest distance of a worker's mean gradient from the overall mean, at the optimum; "
            "`within`: the root mean square distance of a unit's gradient from its worker's mean.",
            "Predicted: `(between + within)^2`, relative to the first row. Measured: the error of `cd-grab`, likewise.",
        ],
    )


def split_result(h: Heterogeneity, strength: float, watch: Watch) -> Result:
    """Both orders on one split."""
    total = h.workers * h.units
    x_SNF, y_SN = clusters(h.seeds, total, h.classes, h.features)
    dealt = [split(y_SN[seed].numpy(), h.workers, strength, seed) for seed in range(h.seeds)]
    index_SN = torch.from_numpy(np.stack(dealt))
    x_SNF = x_SNF.gather(1, index_SN[..., None].expand_as(x_SNF))
    problem = Network(x_SNF, y_SN.gather(1, index_SN), h.classes, 0, h.l2)
    optimum_SD = problem.minimum()
    problem.floors_S = problem.loss(optimum_SD[None])[0]
    everything = problem.take(torch.arange(h.seeds * total).view(h.seeds, total))
    rows_SND = problem.rows(optimum_SD, everything)
    name = {math.inf: "random", 0.0: "sorted by label"}.get(strength, f"Dirichlet({strength:g})")
    return compare(h, name, problem, h.steps, rows_SND, watch)


def size_result(h: Heterogeneity, size: float, watch: Watch) -> Result:
    """Both orders with differences `size` times as large."""
    total = h.workers * h.units
    problem = LeastSquares(h.seeds, total, h.features, h.curvature, noise=size)
    everything = problem.take(torch.arange(h.seeds * total).view(h.seeds, total))
    rows_SND = problem.rows(torch.zeros(h.seeds, h.features, dtype=torch.float64), everything)
    return compare(h, f"{size:g} times", problem, h.size_steps, rows_SND, watch)


def compare(
    h: Heterogeneity, name: str, problem: Problem, steps: tuple[float, ...], rows_SND: torch.Tensor, watch: Watch
) -> Result:
    """Descend with both orders; `rows_SND` are the units' gradients at the optimum."""
    errors: dict[str, Array] = {}
    chosen: list[int] = []
    for order in ORDERS:
        errors_GS = descend(
            problem,
            order,
            workers=h.workers,
            steps=steps,
            looks=[h.epochs],
            tell=lambda order=order: watch.step(f"{name}, {order}"),  # type: ignore[misc]
        )[..., 0]
        means_G = diverged_to_infinity(errors_GS).mean(1)
        chosen.append(int(means_G.argmin()))
        errors[order] = errors_GS[chosen[-1]]
    grouped_SWUD = rows_SND.unflatten(1, (h.workers, h.units))
    means_SWD = grouped_SWUD.mean(2)
    between = (means_SWD - means_SWD.mean(1, keepdim=True)).norm(dim=-1).amax(1).mean()
    within = (grouped_SWUD - means_SWD[:, :, None]).square().sum(-1).mean().sqrt()
    gain = ratio_interval(errors["rr"], errors["cd-grab"], resamples=h.resamples)
    ours, rr = float(errors["cd-grab"].mean()), float(errors["rr"].mean())
    edge = " (edge of the grid)" if {0, len(steps) - 1} & set(chosen) else ""
    best = ", ".join(f"{steps[i]:.3g}" for i in chosen) + edge
    return Result(name, ours, rr, gain, float(between), float(within), best)


def predicted(results: list[Result]) -> list[float]:
    """How much larger the bound is than that of the first result."""
    first = results[0].between + results[0].within
    return [((result.between + result.within) / first) ** 2 for result in results]


def result_table(title: str, what: str, results: list[Result]) -> Table:
    """What was found, beside what the bound predicts."""
    rows = []
    for result, factor in zip(results, predicted(results), strict=True):
        rows.append(
            [
                result.name,
                f"{result.between:.3g}",
                f"{result.within:.3g}",
                f"{result.ours:.2e}",
                f"{result.rr:.2e}",
                f"{result.gain.value:.1f} [{result.gain.low:.1f}, {result.gain.high:.1f}]",
                f"x {factor:.3g}",
                f"x {result.ours / results[0].ours:.3g}",
                result.steps,
            ]
        )
    columns = [what, "between", "within", "error of cd-grab", "error of rr", "gain", "predicted", "measured"]
    return Table(title, [*columns, "best steps"], rows)


def judge(h: Heterogeneity, splits: list[Result], sizes: list[Result]) -> list[Verdict]:
    """That there is a gain where nothing is uneven is a guard; the rest is measured."""
    found = [verdicts.at_least("gain on the random split", splits[0].gain.value, h.surviving)]
    for results in (splits, sizes):
        for result, factor in list(zip(results, predicted(results), strict=True))[1:]:
            claim = f"error no larger than predicted, {result.name}"
            found.append(verdicts.at_most(claim, result.ours / results[0].ours / factor, h.allowance, guards=False))
            found.append(verdicts.at_least(f"gain survives, {result.name}", result.gain.low, 1.0, guards=False))
    return found


def draw(splits: list[Result], sizes: list[Result], path: Path) -> None:
    """Gains on the left of each pair of panels, the bound's prediction and what happened on the right."""
    figure, axes = figures.panels(2, rows=2, width=5.6, height=3.2)
    titles = ("uneven splits", "growing differences")
    for left, right, results, title in ((axes[0], axes[1], splits, titles[0]), (axes[2], axes[3], sizes, titles[1])):
        places = list(range(len(results)))
        gains = [result.gain for result in results]
        figures.line(left, "cd-grab", places, [gain.value for gain in gains], label="gain of cd-grab over rr")
        figures.band(left, "cd-grab", places, [gain.low for gain in gains], [gain.high for gain in gains])
        left.axhline(1.0, **figures.THEORY)
        figures.dress(left, title=f"{title}: gain", across="", up="error of rr / error of cd-grab", log="y")
        figures.line(right, "cd-grab", places, [r.ours / results[0].ours for r in results], label="error of cd-grab")
        figures.line(right, "rr", places, [r.rr / results[0].rr for r in results], label="error of rr")
        right.plot(places, predicted(results), label="the bound's prediction", **figures.THEORY)
        figures.dress(right, title=f"{title}: error", across="", up="relative to the first", log="y")
        for axis in (left, right):
            axis.set_xticks(places, [result.name.replace(" by ", "\nby ") for result in results], fontsize=8)
    figures.legend_below(figure, axes)
    figures.save(figure, path)

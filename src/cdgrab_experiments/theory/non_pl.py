"""`verify non-pl`: which of the rates is seen on a small network, for which the PL condition fails.

Two quantities, because the theorems speak of two: the mean over epochs of the squared gradient norm (`-2/3` without
PL), and the squared gradient norm at the end (`-2` if the function behaves, where the run ends up, as under PL).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cdgrab_experiments.theory import figures, theorems, verdicts
from cdgrab_experiments.theory.descent import descend
from cdgrab_experiments.theory.fits import Tuned, slope, tuned
from cdgrab_experiments.theory.problems.network import Network
from cdgrab_experiments.theory.rates import epoch_means
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.settings import NonPL, Settings
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

MEAN, LAST = "mean over epochs", "last epoch"
TITLES = {MEAN: "squared gradient norm, mean over epochs", LAST: "squared gradient norm at the end"}


@dataclass(frozen=True)
class Found:
    """Tuned errors, and how badly PL fails: the smallest and largest `|gradient|^2 / (2 (loss - lowest loss))` seen."""

    curves: dict[tuple[str, str], Tuned]
    pl_low: float
    pl_high: float


def run(settings: Settings, watch: Watch) -> Outcome:
    """A teacher with noise, a student with as many hidden units."""
    n = settings.non_pl
    found = measure(n, watch)
    return Outcome(
        title=(
            f"{n.inputs}-{n.hidden}-1 network (tanh), squared loss, {n.workers} workers with {n.units} units each, "
            f"{n.horizons[0]} to {n.horizons[-1]} epochs, step tuned per horizon"
        ),
        seeds=f"0 to {n.seeds - 1}, each with its own data and its own start",
        tables=[slope_table(n, what, found) for what in TITLES],
        verdicts=judge(n, found),
        draw=lambda path: draw(n, found, path),
        notes=[
            "PL would need a constant below `|gradient|^2 / (2 (loss - lowest loss))`. Along the runs of `cd-grab` "
            f"this ratio went from {found.pl_high:.2g} down to {found.pl_low:.1g}.",
        ],
    )


def teacher(n: NonPL) -> Network:
    """Noisy targets from a random network of the same shape."""
    total = n.workers * n.units
    rng = torch.Generator().manual_seed(n.hidden)
    x_SNF = torch.randn(n.seeds, total, n.inputs, generator=rng, dtype=torch.float64)
    weight_SFH = torch.randn(n.seeds, n.inputs, n.hidden, generator=rng, dtype=torch.float64)
    readout_SH1 = torch.randn(n.seeds, n.hidden, 1, generator=rng, dtype=torch.float64)
    noise_SN = n.noise * torch.randn(n.seeds, total, generator=rng, dtype=torch.float64)
    y_SN = (torch.tanh(x_SNF @ weight_SFH) @ readout_SH1)[..., 0] + noise_SN
    return Network(x_SNF, y_SN, outputs=1, hidden=n.hidden, l2=0.0, goal="gradient")


def measure(n: NonPL, watch: Watch) -> Found:
    """Tuned errors of every order, for both quantities."""
    problem, across_H = teacher(n), np.array(n.horizons, dtype=float)
    looks = range(n.horizons[-1] + 1)
    watch.begin("non-pl", (len(n.orders) + 1) * n.horizons[-1])
    curves = {}
    for order in n.orders:

        def tell(order: str = order) -> None:
            watch.step(order)

        errors_GSM = descend(problem, order, workers=n.workers, steps=n.steps, looks=looks, tell=tell)
        curves[MEAN, order] = tuned(epoch_means(errors_GSM, n.horizons), across_H, resamples=n.resamples)
        curves[LAST, order] = tuned(errors_GSM[..., list(n.horizons)], across_H, resamples=n.resamples)
        if order == "cd-grab":
            gradients_GSM = errors_GSM
    # The same runs once more, for their losses.
    problem.goal = "loss"
    losses_GSM = descend(
        problem,
        "cd-grab",
        workers=n.workers,
        steps=n.steps,
        looks=looks,
        tell=lambda: watch.step("cd-grab, losses"),
    )
    above_GSM = losses_GSM - np.nanmin(losses_GSM, axis=(0, 2), keepdims=True)
    # Within a hundredth of the lowest loss seen the difference is not to be trusted: the true lowest is not known.
    seen = np.isfinite(above_GSM) & (above_GSM > 0.01 * np.nanmin(losses_GSM)) & (losses_GSM < losses_GSM[..., :1])
    ratios = (gradients_GSM / (2 * np.where(seen, above_GSM, 1.0)))[seen]
    return Found(curves, float(ratios.min()), float(ratios.max()))


def slope_table(n: NonPL, what: str, found: Found) -> Table:
    """Slopes beside both theories, over all horizons and over the later half of them."""
    across_H = np.array(n.horizons, dtype=float)
    half = len(across_H) // 2
    rows = []
    for order in n.orders:
        t = found.curves[what, order]
        later = float(slope(across_H[half:], t.errors_H[half:]))
        (low, high), (flat, _) = theorems.pl_slope(order, across_H), theorems.non_convex_slope(order)
        edge = " (edge of the grid)" if {0, len(n.steps) - 1} & set(t.best_H.tolist()) else ""
        steps = f"{n.steps[t.best_H[0]]:.3g} to {n.steps[t.best_H[-1]]:.3g}{edge}"
        cells = [str(t.slope), f"{later:.2f}", f"{flat:.2f}", f"{low:.2f} to {high:.2f}"]
        rows.append([order, *cells, f"{t.errors_H[0]:.2e}", f"{t.errors_H[-1]:.2e}", steps])
    columns = ["order", "slope", f"from {n.horizons[half]} epochs on", "theory, not convex", "theory, PL"]
    columns += [f"at {n.horizons[0]}", f"at {n.horizons[-1]}", "best steps"]
    return Table(f"{TITLES[what][0].upper()}{TITLES[what][1:]}", columns, rows)


def judge(n: NonPL, found: Found) -> list[Verdict]:
    """The theorem bounds the mean over epochs; the end of a run is compared with PL's rate to see which is seen."""
    across_H = np.array(n.horizons, dtype=float)
    results = []
    for order in n.orders:
        curve = found.curves[MEAN, order].slope
        claim = f"`{order}`, mean over epochs: the non-convex rate"
        results.append(verdicts.slope_within(claim, curve, *theorems.non_convex_slope(order)))
    for order in n.orders:
        curve = found.curves[LAST, order].slope
        claim = f"`{order}`, at the end: PL's rate all the same"
        results.append(verdicts.slope_within(claim, curve, *theorems.pl_slope(order, across_H)))
    share = found.curves[MEAN, "cd-grab"].errors_H[-1] / found.curves[MEAN, "rr"].errors_H[-1]
    results.append(verdicts.at_most("`cd-grab` / `rr`, mean over epochs, longest horizon", float(share), n.share_of_rr))
    return results


def draw(n: NonPL, found: Found, path: Path) -> None:
    """Both quantities, with theory's slopes."""
    figure, axes = figures.panels(2, width=5.2)
    across_H = np.array(n.horizons, dtype=float)
    for axis, what in zip(axes, TITLES, strict=True):
        for order in n.orders:
            t = found.curves[what, order]
            figures.line(axis, order, n.horizons, t.errors_H)
            figures.band(axis, order, n.horizons, t.low_H, t.high_H)
        start = found.curves[what, "cd-grab"].errors_H[0]
        for power, text in ((-2 / 3, "slope -2/3"), (-2.0, "slope -2")):
            guide = 0.5 * start * (across_H / across_H[0]) ** power
            figures.guide(axis, text, across_H, guide)
        figures.dress(axis, title=what, across="epochs", up="squared gradient norm")
        axis.set_xticks(n.horizons, [str(horizon) for horizon in n.horizons])
    figures.legend_below(figure, axes)
    figures.save(figure, path)

"""`verify herding`: how far balancing brings the herding bound down, and with what it copes.

The first check to run: a wrong sign, a broken fill or a broken rule shows here within seconds.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from torch import Tensor

import cdgrab
from cdgrab_experiments.theory import figures, verdicts
from cdgrab_experiments.theory.adversarial import hard_cases
from cdgrab_experiments.theory.fits import Array, slope
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.rounds import balance_rounds
from cdgrab_experiments.theory.settings import Herding, Settings
from cdgrab_experiments.theory.vectors import unit_vectors
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

THREADS = 2  # compiled loops leave the interpreter alone, so two threads do use two cores

Series = tuple[str, str]  # order and rule
Curves = dict[tuple[Series, int], Array]


def run(settings: Settings, watch: Watch) -> Outcome:
    """The paper's random vectors at every number of workers; then adversarial ones."""
    h = settings.herding
    curves = measure(h, watch)
    hard_table, hard_verdicts = hard_cases(h, watch)
    return Outcome(
        title=f"{h.vectors:,} random unit vectors of dimension {h.dim}, {h.rounds} rounds",
        seeds=f"{h.seed}",
        tables=[level_table(h, curves), hard_table],
        verdicts=judge(h, curves) + hard_verdicts,
        draw=lambda path: draw(h, curves, path),
        notes=[
            f"Level: the mean herding bound of the last {h.tail} rounds. All orders start at the same random order.",
            "`a few giants`: a handful of vectors outweighs all others together, and no order can do much about that.",
        ],
    )


def label(series: Series) -> str:
    """The name of a series in tables and figures: the rule is told where it is not the paper's."""
    order, rule = series
    return order if rule == "greedy" else f"{order}, {rule}"


def measure(h: Herding, watch: Watch) -> Curves:
    """The herding bound before the first round and after each, for every series and number of workers."""
    cdgrab.balance_vectors(unit_vectors(1, 2, h.dim, 0))  # compile once, before threads would do it twice
    watch.begin("herding", len(h.series) * len(h.workers) * h.rounds)
    curves: Curves = {}
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for workers in h.workers:
                vectors_WUD = unit_vectors(workers, h.vectors // workers, h.dim, h.seed)
                bounds = functools.partial(_bounds, h, vectors_WUD, watch)
                for series, found in zip(h.series, pool.map(bounds, h.series), strict=True):
                    curves[series, workers] = found
        except BaseException:
            watch.stop.set()  # the pool waits for its threads, and they would go on to their last round
            raise
    return curves


def _bounds(h: Herding, vectors_WUD: Tensor, watch: Watch, series: Series) -> Array:
    """One series, unless somebody wants to stop."""
    found: list[float] = []
    for done in balance_rounds(vectors_WUD, *series, h.rounds, h.seed):
        if watch.stop.is_set():
            break
        if found:
            watch.step(f"{label(series)}, {len(vectors_WUD)} workers")
        found.append(done.bound)
    return np.array(found)


def level(h: Herding, curve: Array) -> float:
    """Where the bound comes to rest."""
    return float(curve[-h.tail :].mean())


def level_table(h: Herding, curves: Curves) -> Table:
    """A row for every series, a column for every number of workers, and the power with which it grows."""
    rows = []
    for series in h.series:
        levels = [level(h, curves[series, workers]) for workers in h.workers]
        rows.append([label(series), *(f"{x:.3g}" for x in levels), f"{growth(h, curves, series):+.2f}"])
    columns = ["order", *(f"W = {workers}" for workers in h.workers), "power of W"]
    return Table("Level of the herding bound", columns, rows)


def growth(h: Herding, curves: Curves, series: Series) -> float:
    """The power of the number of workers with which the level grows."""
    levels = np.array([level(h, curves[series, workers]) for workers in h.workers])
    return float(slope(np.array(h.workers, dtype=float), levels))


def judge(h: Herding, curves: Curves) -> list[Verdict]:
    """All of these are guards: they must hold of any correct implementation."""
    ours: Series = ("cd-grab", "greedy")
    found = []
    for workers in h.workers:
        curve = curves[ours, workers]
        far = curve[:-1] > h.far * level(h, curve)  # nearer to the level it has to slow down
        ratio = float(np.median((curve[1:] / curve[:-1])[far])) if far.any() else float("nan")
        found.append(verdicts.within(f"`cd-grab` halves per round, {workers} workers", ratio, *h.falling))
    for workers in h.workers:
        at = level(h, curves[ours, workers])
        found.append(verdicts.within(f"`cd-grab` levels, {workers} workers", at, *h.level))
    for series in h.series:
        if series[0] in ("pair", "id-grab"):
            power = growth(h, curves, series)
            found.append(verdicts.within(f"`{label(series)}` grows like the root of W", power, *h.growth))
        if series[0] == "rr":
            levels = [level(h, curves[series, workers]) for workers in h.workers]
            for at, which in ((min(levels), "least"), (max(levels), "most")):
                found.append(verdicts.within(f"`rr` stays where it was, {which} over W", at, *h.at_random))
        if series[1] != "greedy":
            worst = max(level(h, curves[series, w]) / curves[series, w][0] for w in h.workers)
            found.append(verdicts.at_most(f"`{label(series)}` balances: level / random, worst W", worst, h.rules_share))
    return found


def draw(h: Herding, curves: Curves, path: Path) -> None:
    """The bound round by round at the fewest and the most workers, and its level against the number of workers."""
    figure, axes = figures.panels(3)
    rounds = list(range(h.rounds + 1))
    for axis, workers in zip(axes, (h.workers[0], h.workers[-1]), strict=False):
        for series in h.series:
            figures.line(axis, label(series), rounds, curves[series, workers])
        axis.set_ylim(1, 1000)
        figures.dress(axis, title=f"{workers} workers", across="round", up="herding bound", log="y")
        axis.set_xticks(range(0, h.rounds + 1, 3))
    for series in h.series:
        levels = [level(h, curves[series, workers]) for workers in h.workers]
        figures.line(axes[2], label(series), h.workers, levels)
    axes[2].set_ylim(1, 1000)
    figures.dress(axes[2], title="where it levels", across="workers", up="herding bound")
    axes[2].set_xticks(h.workers, [str(workers) for workers in h.workers])
    axes[2].axhspan(*h.level, color="#D55E00", alpha=0.12, linewidth=0, label="expected of cd-grab")
    figures.legend_below(figure, axes)
    figures.save(figure, path)

"""`verify step-size`, `momentum`, `adam` and `when-it-helps`: where ordering helps, where it does not, where it hurts.

No theorem speaks about momentum and Adam; what is reported here is what was measured. The one guard is that plain SGD
on the convex model gains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cdgrab_experiments.theory import figures, verdicts
from cdgrab_experiments.theory.gain import NETWORK, SOFTMAX, TASKS, Point, best, calls, compare
from cdgrab_experiments.theory.optimisers import Adam, Sgd
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.settings import Gain, Settings
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

LOOKS = {SOFTMAX: ("#D55E00", "o"), NETWORK: ("#0072B2", "s")}
GAIN = "loss of rr / loss of cd-grab"


@functools.cache
def sgd_points(g: Gain, watch: Watch) -> list[Point]:
    """Plain SGD at every step size."""
    watch.begin("step-size", calls(g, g.steps))
    return [point for name in TASKS for point in compare(g, name, "SGD", g.steps, Sgd, watch)]


@functools.cache
def momentum_points(g: Gain, watch: Watch) -> list[Point]:
    """Momentum, with the step multiplied by `1 - momentum`."""
    watch.begin("momentum", len(g.momenta) * calls(g, g.momentum_steps))
    found = []
    for name in TASKS:
        for momentum in g.momenta:
            steps = [step * (1 - momentum) for step in g.momentum_steps]
            make = functools.partial(Sgd, momentum=momentum)
            found += compare(g, name, f"momentum {momentum:g}", steps, make, watch)
    return found


@functools.cache
def adam_points(g: Gain, watch: Watch) -> list[Point]:
    """Adam, and AdamW."""
    watch.begin("adam", 2 * calls(g, g.adam_steps))
    found = []
    for name in TASKS:
        for label, decay in (("Adam", 0.0), ("AdamW", g.weight_decay)):
            found += compare(g, name, label, g.adam_steps, functools.partial(Adam, weight_decay=decay), watch)
    return found


def step_size(settings: Settings, watch: Watch) -> Outcome:
    """The gain against the step size."""
    g = settings.gain
    points = sgd_points(g, watch)
    guard = best([point for point in points if point.task == SOFTMAX], "rr")
    claim = f"plain SGD gains on {SOFTMAX}, at rr's best step"
    return Outcome(
        title=f"SGD on digits, {_regime(g)}",
        seeds=_seeds(g),
        tables=[point_table("SGD", points), best_table("Best step sizes", points)],
        verdicts=[verdicts.at_least(claim, guard.gain.value, g.helps), *_tuned_verdicts(points)],
        draw=lambda path: _single(path, lambda axis: draw_steps(axis, points, "SGD")),
        notes=_notes(g),
    )


def momentum(settings: Settings, watch: Watch) -> Outcome:
    """The gain against momentum."""
    g = settings.gain
    points = momentum_points(g, watch)
    return Outcome(
        title=f"SGD with momentum on digits, step times (1 - momentum), {_regime(g)}",
        seeds=_seeds(g),
        tables=[point_table("Momentum", points)],
        verdicts=[_worst_verdict(points, name) for name in TASKS],
        draw=lambda path: _single(path, lambda axis: draw_momentum(axis, g, points)),
        notes=_notes(g),
    )


def adam(settings: Settings, watch: Watch) -> Outcome:
    """The gain under Adam and AdamW."""
    g = settings.gain
    points = adam_points(g, watch)
    return Outcome(
        title=f"Adam and AdamW (weight decay {g.weight_decay:g}) on digits, {_regime(g)}",
        seeds=_seeds(g),
        tables=[point_table("Adam and AdamW", points), best_table("Best step sizes", points)],
        verdicts=_tuned_verdicts(points),
        draw=lambda path: _single(path, lambda axis: draw_steps(axis, points, "Adam")),
        notes=_notes(g),
    )


def when_it_helps(settings: Settings, watch: Watch) -> Outcome:
    """All three in one figure."""
    g = settings.gain
    sgd, heavy, adaptive = sgd_points(g, watch), momentum_points(g, watch), adam_points(g, watch)
    points = [*sgd, *heavy, *adaptive]

    def draw(path: Path) -> None:
        figure, axes = figures.panels(3)
        draw_steps(axes[0], sgd, "SGD")
        draw_momentum(axes[1], g, heavy)
        draw_steps(axes[2], adaptive, "Adam")
        figures.legend_below(figure, axes)
        figures.save(figure, path)

    words = ("helps", "no difference", "hurts", "diverged")
    kinds = {"SGD": sgd, "momentum": heavy, "Adam and AdamW": adaptive}
    rows = [
        [kind, name, *(str(sum(p.word == word for p in some if p.task == name)) for word in words)]
        for kind, some in kinds.items()
        for name in TASKS
    ]
    hurts = sum(point.word == "hurts" for point in points)
    return Outcome(
        title=f"All step sizes and optimisers on digits, {_regime(g)}",
        seeds=_seeds(g),
        tables=[Table("Settings in which ordering ...", ["optimiser", "model", *words], rows, left=2)],
        verdicts=[verdicts.within("share of settings it hurts", hurts / len(points), 0.0, g.harmless, guards=False)],
        draw=draw,
        notes=[*_notes(g), "Within `all` these are the runs of `step-size`, `momentum` and `adam`, and take no time."],
    )


def draw_steps(axis: Axes, points: list[Point], optimiser: str) -> None:
    """Gain against step size, a line for each model; the best step of `rr` is marked."""
    for name, (colour, _) in LOOKS.items():
        mine = [p for p in points if (p.task, p.optimiser) == (name, optimiser) and np.isfinite(p.gain.value)]
        _gains(axis, [point.single for point in mine], mine, name)
        if mine:
            chosen = best(mine, "rr")
            where = ([chosen.single], [chosen.gain.value])
            axis.scatter(*where, s=150, marker="*", color=colour, edgecolor="black", zorder=5, label="best step of rr")
    figures.dress(axis, title=optimiser, across="step size", up=GAIN, base=10)


def draw_momentum(axis: Axes, g: Gain, points: list[Point]) -> None:
    """Gain against momentum, a line for each model and step."""
    for name in TASKS:
        for i, step in enumerate(g.momentum_steps):
            mine = [point for point in points if point.task == name][i :: len(g.momentum_steps)]
            single = step / (g.examples // g.workers)
            _gains(axis, range(len(mine)), mine, f"{name}, step {single:.2g}", ("-", "--")[i % 2])
    figures.dress(axis, title="momentum (step times 1 - momentum)", across="momentum", up=GAIN, log="y")
    axis.set_xticks(range(len(g.momenta)), [f"{momentum:g}" for momentum in g.momenta])


def point_table(title: str, points: list[Point]) -> Table:
    """A row for every point."""
    rows = [
        [
            p.task,
            p.optimiser,
            f"{p.single:.3g}",
            f"{p.rr:.3g}",
            f"{p.ours:.3g}",
            f"{p.gain.value:.2f} [{p.gain.low:.2f}, {p.gain.high:.2f}]",
            "never" if p.epochs is None else str(p.epochs),
            p.word,
        ]
        for p in points
    ]
    columns = ["model", "optimiser", "step", "loss of rr", "loss of cd-grab", "gain", "epochs", "ordering"]
    return Table(title, columns, rows, left=2)


def best_table(title: str, points: list[Point]) -> Table:
    """Each order at its own best step."""
    rows = []
    for name, optimiser in dict.fromkeys((point.task, point.optimiser) for point in points):
        mine = [point for point in points if (point.task, point.optimiser) == (name, optimiser)]
        rr, ours = best(mine, "rr"), best(mine, "cd-grab")
        cells = [f"{rr.rr:.4g} at {rr.single:.3g}", f"{ours.ours:.4g} at {ours.single:.3g}", f"{rr.rr / ours.ours:.2f}"]
        rows.append([name, optimiser, *cells])
    return Table(title, ["model", "optimiser", "rr", "cd-grab", "gain, both tuned"], rows, left=2)


def _tuned_verdicts(points: list[Point]) -> list[Verdict]:
    found = []
    for name, optimiser in dict.fromkeys((point.task, point.optimiser) for point in points):
        mine = [point for point in points if (point.task, point.optimiser) == (name, optimiser)]
        ratio = best(mine, "rr").rr / best(mine, "cd-grab").ours
        found.append(verdicts.at_least(f"gain, both tuned: {name}, {optimiser}", ratio, 1.0, guards=False))
    return found


def _worst_verdict(points: list[Point], name: str) -> Verdict:
    worst = min((point for point in points if point.task == name), key=lambda point: point.gain.high)
    claim = f"hurts nowhere: {name}; least with {worst.optimiser}, step {worst.single:.2g}, upper end of the gain"
    return verdicts.at_least(claim, worst.gain.high, 1.0, guards=False)


def _gains(axis: Axes, across: Sequence[float], points: list[Point], label: str, line: str = "-") -> None:
    colour, marker = LOOKS[points[0].task] if points else ("black", "")
    gains = [point.gain for point in points]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.6, "linestyle": line}
    axis.plot(across, [gain.value for gain in gains], label=label, **style)
    low, high = [gain.low for gain in gains], [gain.high for gain in gains]
    axis.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.axhline(1.0, **figures.THEORY)


def _single(path: Path, draw: Callable[[Axes], None]) -> None:
    figure, axes = figures.panels(1, width=6.4, height=4.2)
    draw(axes[0])
    figures.legend_below(figure, axes)
    figures.save(figure, path)


def _regime(g: Gain) -> str:
    return f"{g.examples} images, {g.workers} workers with one each per step, {g.epochs} epochs"


def _seeds(g: Gain) -> str:
    return f"0 to {g.seeds - 1}, each with its own deal and start"


def _notes(g: Gain) -> list[str]:
    return [
        f"Losses of {SOFTMAX} are measured from the minimum, those of the {NETWORK} from zero. Training losses, all.",
        "Gain: loss of `rr` / loss of `cd-grab`. Epochs: from when on `cd-grab` stays below the final loss of `rr`.",
        f"helps, hurts: the 95% interval of the gain lies above {g.worth}, below 1 / {g.worth}.",
    ]

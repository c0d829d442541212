"""Comparisons in, figures out (PNG and PDF), in the manner of the paper; nothing is trained here."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from cdgrab_experiments.compare import Comparison
from cdgrab_experiments.curves import Array, Band, Curve, curves, time_split
from cdgrab_experiments.looks import Look, looks
from cdgrab_experiments.whole_files import write_whole

DPI = 96
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "pdf.fonttype": 42,  # text stays text
}
# Neutral, then what ordering adds in the colours that stand out.
PART_COLOURS = {
    "forward, backward, step": "#B9C0C9",
    "data": "#7F8A99",
    "exchange": "#56B4E9",
    "sorter": "#D55E00",
    "other": "#E4E7EB",
}


def write_figures(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Every figure there is something for, as PNG and PDF in `folder`; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    used: set[str] = set()

    def stem(title: str) -> Path:
        """Titles may differ in signs that file names cannot hold."""
        name = next(name for i in range(1, 10_000) if (name := slug(title) + f"-{i}" * (i > 1)) not in used)
        used.add(name)
        return folder / name

    with warnings.catch_warnings():
        # Names in records may be in any script, and of any length.
        warnings.filterwarnings("ignore", "Glyph .* missing from font|Tight layout not applied", UserWarning)
        for comparison in comparisons:
            written += training([comparison], stem(f"{comparison.title} training"))
            written += ordering(comparison, stem(f"{comparison.title} ordering"))
        for group in by_workers(comparisons):
            written += workers(group, stem(f"{task_title(group[0])} by workers"))
    return written


def training(comparisons: Sequence[Comparison], stem: Path) -> list[Path]:
    """Loss against epochs, loss against seconds, metric against epochs; a row of panels for every setting.

    The line is the mean over seeds, the band the range they span.
    """
    lines = [(comparison, curves(comparison.runs)) for comparison in comparisons]
    lines = [(comparison, found) for comparison, found in lines if found]
    if not lines:
        return []
    chosen = looks(name for comparison in comparisons for name in comparison.runs)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(len(lines), 3, figsize=(11.4, 3.05 * len(lines) + 0.75), squeeze=False)
        for axes, (comparison, found) in zip(grid, lines, strict=True):
            known = all(line.above is not None for line in found.values())
            what = "loss above the minimum" if known else "training loss"
            quantity = "above" if known else "loss"
            _panel(axes[0], found, chosen, quantity, "epochs", what, log=known)
            _panel(axes[1], found, chosen, quantity, "seconds", what, log=known)
            _panel(axes[2], found, chosen, "metric", "epochs", comparison.any_run.info.metric, log=False)
            axes[1].set_ylim(axes[0].get_ylim())
            axes[0].set_title(plain(comparison.title), loc="left", fontweight="bold", color="#222222")
        return _finish(figure, grid, stem, chosen)


def ordering(comparison: Comparison, stem: Path) -> list[Path]:
    """How balanced the orders are (herding bound, else imbalance), and where the seconds of an epoch go."""
    found = curves(comparison.runs)
    split = {name: parts for name, runs in comparison.runs.items() if (parts := time_split(runs))}
    balance = next((q for q in ("herding_bound", "imbalance") if any(q in c.bands() for c in found.values())), None)
    panels = [panel for panel, there in (("balance", balance), ("time", split)) if there]
    if not panels:
        return []
    chosen = looks(comparison.runs)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(4.6 * len(panels) + 0.8, 3.8), squeeze=False)
        axes = list(grid[0])
        if balance:
            some = {name: line for name, line in found.items() if balance in line.bands()}
            _panel(axes[0], some, chosen, balance, "epochs", balance.replace("_", " "), log=True, zoom=False)
        if split:
            _time_bars(axes[-1], split)
        axes[0].set_title(plain(comparison.title), loc="left", fontweight="bold", color="#222222")
        return _finish(figure, grid, stem, chosen)


def workers(group: Sequence[Comparison], stem: Path) -> list[Path]:
    """Final loss against the number of workers, by order: coordination shows in a line that stays flat."""
    names = dict.fromkeys(row.contender for comparison in group for row in comparison.rows)
    chosen = looks(names)
    known = all(row.above is not None for comparison in group for row in comparison.rows if row.final)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(5.4, 4.0))
        for name in names:
            points = [
                (comparison.setting.workers, final)
                for comparison in group
                if (row := comparison.row(name)) and (final := row.above if known else row.final)
            ]
            if points:
                look = chosen[name]
                across = [count for count, _ in points]
                axis.errorbar(
                    across,
                    [final.mean for _, final in points],
                    yerr=[final.deviation or 0.0 for _, final in points],
                    **_line(look),
                    marker=look.marker,
                    markersize=6,
                    capsize=3,
                    elinewidth=1.0,
                    label=name,
                )
        counts = sorted({comparison.setting.workers for comparison in group})
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(counts))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if known:
            _log_ticks(axis)
        axis.set(xlabel="workers", ylabel="final loss above the minimum" if known else "final training loss")
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.set_title(plain(task_title(group[0])), loc="left", fontweight="bold", color="#222222")
        return _finish(figure, np.array([[axis]]), stem, chosen)


def by_workers(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Settings that differ in the number of workers only, where there are several numbers.

    The step size may differ too: it is often chosen per example.
    """
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for comparison in comparisons:
        s = comparison.setting
        rest = (s.task, s.variant, s.epochs, s.optimizer, s.momentum, s.weight_decay, s.schedule, s.partition)
        groups.setdefault(rest, []).append(comparison)
    found = [[c for c in group if any(row.final for row in c.rows)] for group in groups.values()]
    # Two settings with one number of workers (a sweep over step sizes) would be two points above each other.
    return [g for g in found if len({c.setting.workers for c in g}) == len(g) > 1]


def task_title(comparison: Comparison) -> str:
    """The setting in words, without its number of workers."""
    s = comparison.setting
    name = f"{s.task} ({s.variant})" if s.variant else s.task
    return name if s.partition == "iid" else f"{name}, {s.partition} split"


def slug(title: str) -> str:
    """A file name for a title, whatever it holds."""
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.")[:80] or "setting"


def plain(text: str) -> str:
    """`text` without the signs between which matplotlib would read mathematics."""
    return text.replace("$", r"\$")


def zoom_limits(bands: Sequence[tuple[Array, Band]]) -> tuple[float, float] | None:
    """Limits that show where lines part: without a minimum to measure from, the first epochs dwarf all others."""
    values: list[float] = []
    for across, band in bands:
        late = across >= 0.3 * across[-1]
        values += [float(v) for edge in (band.low, band.high) for v in edge[late] if np.isfinite(v)]
    if not values or max(values) <= min(values):
        return None
    margin = 0.05 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def _panel(
    axis: Axes,
    found: dict[str, Curve],
    chosen: dict[str, Look],
    quantity: str,
    across: str,
    label: str,
    *,
    log: bool,
    zoom: bool = True,
) -> None:
    drawn, why = [], "not recorded"
    for name, line in found.items():
        band: Band | None = getattr(line, quantity)
        if band is None:
            continue
        x: Array = getattr(line, across)
        if np.isnan(x).all():
            why = "the runs shared the machine"
            continue
        drawn.append((x, band))
        mean, low, high = (
            [np.where(v > 0, v, np.nan) for v in (band.mean, band.low, band.high)]
            if log
            else (band.mean, band.low, band.high)
        )
        axis.plot(x, mean, **_line(chosen[name]), label=name)
        axis.fill_between(x, low, high, color=chosen[name].light, alpha=0.16, linewidth=0)
    axis.set(xlabel=across, ylabel=plain(label))
    axis.grid(alpha=0.3, linewidth=0.5)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=across == "epochs"))
    axis.margins(x=0.02)
    if not drawn:
        axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center", color="#888888")
        axis.set_xticks([])
    elif log:
        _log_ticks(axis)
    elif zoom and (limits := zoom_limits(drawn)):
        axis.set_ylim(*limits)


def _log_ticks(axis: Axes) -> None:
    """Logarithmic, with numbers also where less than a decade is spanned."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if low > 0 and high / low < 30:
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _time_bars(axis: Axes, split: dict[str, dict[str, float]]) -> None:
    names = list(split)
    parts = [part for part in PART_COLOURS if any(found.get(part, 0.0) > 0 for found in split.values())]
    start = np.zeros(len(names))
    for part in parts:
        width = np.array([split[name].get(part, 0.0) for name in names])
        axis.barh([plain(name) for name in names], width, left=start, color=PART_COLOURS[part], height=0.62, label=part)
        start += width
    for i, total in enumerate(start):
        axis.text(total, i, f" {total:.3g} s", va="center", fontsize=9, color="#555555")
    axis.set(xlabel="seconds per epoch", xlim=(0, max(start) * 1.22))
    axis.invert_yaxis()
    axis.grid(alpha=0.3, linewidth=0.5, axis="x")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3 if len(parts) == 3 else 2,
        frameon=False,
        fontsize=8,
        handlelength=1,
        columnspacing=1.2,
        borderaxespad=0.2,
    )


def _line(look: Look) -> dict[str, Any]:
    return {"color": look.light, "linewidth": 1.7, "linestyle": (0, look.dash) if look.dash else "solid"}


def _finish(figure: Figure, grid: Any, stem: Path, chosen: dict[str, Look]) -> list[Path]:
    """One legend below all panels, where it hides nothing; then the files."""
    entries: dict[str, Any] = {}
    for axis in grid.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if str(label) in chosen:
                entries.setdefault(str(label), handle)
    height = float(figure.get_size_inches()[1])
    widest = 0.75 + 0.085 * max(map(len, entries), default=0)  # inches: the line, and about what a letter takes
    columns = max(1, min(len(entries), int(figure.get_size_inches()[0] / widest)))
    rows = -(-len(entries) // columns)
    figure.tight_layout(rect=(0, (0.12 + 0.24 * rows) / height if rows else 0, 1, 1), w_pad=2.0, h_pad=1.6)
    if entries:
        figure.legend(
            list(entries.values()),
            [plain(name) for name in entries],
            loc="lower center",
            ncols=columns,
            frameon=False,
            handlelength=2.6,
        )
    return _save(figure, stem)


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Write both files under another name first, so that each is whole or absent."""
    image, vector = io.BytesIO(), io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    figure.savefig(vector, format="pdf", metadata={"CreationDate": None})  # the same records give the same file
    plt.close(figure)
    # Lines and bands need few colours; with a palette the file takes a third.
    small = io.BytesIO()
    with Image.open(image) as picture:
        picture.convert("RGB").quantize(colors=128, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    paths = []
    for suffix, content in ((".png", small), (".pdf", vector)):
        path = stem.with_name(stem.name + suffix)
        write_whole(path, content.getvalue())
        paths.append(path)
    return paths

"""What all figures share: colours, axes, and files that are whole or absent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
import numpy.typing as npt

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

# Distinguishable with any colour vision (Okabe and Ito), and by their markers where colours are not seen at all.
STYLES: dict[str, tuple[str, str]] = {
    "cd-grab": ("#D55E00", "o"),
    "rr": ("#0072B2", "s"),
    "pair": ("#009E73", "^"),
    "grab": ("#009E73", "v"),
    "id-grab": ("#CC79A7", "D"),
    "shuffle-once": ("#E69F00", "P"),
    "with-replacement": ("#56B4E9", "X"),
    "cd-grab, walk": ("#E69F00", "P"),
    "cd-grab, halving": ("#56B4E9", "X"),
}
THEORY: dict[str, Any] = {"color": "#444444", "linewidth": 1.0, "linestyle": (0, (4, 2))}


def panels(columns: int, *, width: float = 4.4, height: float = 3.6, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, left to right and top to bottom."""
    figure, grid = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    return figure, list(grid.flat)


def line(axis: Axes, order: str, across: Sequence[float], values: npt.ArrayLike, **options: Any) -> None:
    """One order's line, in its colour and with its marker."""
    colour, marker = STYLES[order]
    look = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.6, "label": order}
    axis.plot(across, np.asarray(values), **{**look, **options})


def band(axis: Axes, order: str, across: Sequence[float], low: npt.ArrayLike, high: npt.ArrayLike) -> None:
    """What the seeds leave open."""
    axis.fill_between(across, np.asarray(low), np.asarray(high), color=STYLES[order][0], alpha=0.18, linewidth=0)


def guide(axis: Axes, text: str, across: npt.ArrayLike, values: npt.ArrayLike) -> None:
    """A line of theory's slope, with its name at the end."""
    across, values = np.asarray(across), np.asarray(values)
    axis.plot(across, values, **THEORY)
    end = (float(across[-1]), float(values[-1]))
    axis.annotate(text, end, xytext=(4, 0), textcoords="offset points", fontsize=8, va="center", annotation_clip=False)


def dress(axis: Axes, *, title: str, across: str, up: str, log: str = "xy", base: float = 2) -> None:
    """Title, labels, scales, a light grid."""
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    if "x" in log:
        axis.set_xscale("log", base=base)
    if "y" in log:
        axis.set_yscale("log")
        _plain_ticks(axis)
    axis.grid(alpha=0.3, which="major", linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, below them, where it hides nothing."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(str(label), handle)
    figure.tight_layout()
    width, height = map(float, figure.get_size_inches())
    longest = max(map(len, entries), default=1)
    columns = max(1, min(len(entries), int(width / (0.75 + 0.065 * longest))))
    rows = -(-len(entries) // columns)
    figure.subplots_adjust(bottom=(0.62 + 0.22 * rows) / height)
    figure.legend(list(entries.values()), list(entries), loc="lower center", ncols=columns, frameon=False, fontsize=9)


def save(figure: Figure, path: Path) -> None:
    """Write to a temporary name first, so that a file is whole or absent; 128 colours are plenty and save space."""
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=84)
    plt.close(figure)
    with Image.open(partial) as image:
        image.convert("RGB").quantize(128).save(partial, optimize=True)
    partial.replace(path)


def _plain_ticks(axis: Axes) -> None:
    """1, 2, 5 rather than powers of ten where an axis spans about two decades or less."""
    low, high = axis.get_ylim()
    axis.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    if high / low > 300:
        return
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    factors = (1, 2, 5) if high / low > 6 else (1, 1.1, 1.2, 1.5, 2, 3, 4, 5, 7, 9)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.yaxis.set_minor_locator(mpl.ticker.NullLocator())

"""The figure of the README, light and dark, from the records of M4 with 4 workers.

python docs/front_figure.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from cdgrab_experiments.curves import Curve, curves
from cdgrab_experiments.looks import KNOWN
from cdgrab_experiments.records import Run, load_all

DOCS = Path(__file__).parent
NAMES = {"rr": "random reshuffling", "cd-grab": "cdgrab"}
INK = {"light": "#333333", "dark": "#C9D1D9"}


def records(workers: int = 4) -> dict[str, dict[int, Run]]:
    """The runs by order and seed."""
    found: dict[str, dict[int, Run]] = {name: {} for name in NAMES}
    for run in load_all(DOCS / "results" / "records" / "m4"):
        if run.config.workers == workers and run.config.order in found:
            found[run.config.order][run.config.seed] = run
    return found


def draw(lines: dict[str, Curve], shade: str, path: Path) -> None:
    """Loss against epochs and against seconds; the line is the mean over seeds, the band the range they span."""
    ink = INK[shade]
    style: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    coloured = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    with plt.rc_context(style | coloured):
        figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.2), sharey=True)
        for axis, across in zip(axes, ("epochs", "seconds"), strict=True):
            for name, label in NAMES.items():
                x, band, colour = getattr(lines[name], across), lines[name].loss, getattr(KNOWN[name], shade)
                axis.plot(x, band.mean, color=colour, linewidth=1.8, label=label)
                axis.fill_between(x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
            axis.set(xlabel=across, ylim=(0.09, 0.112))
            axis.grid(alpha=0.25, linewidth=0.5, color=ink)
        axes[0].set_ylabel("training loss")
        axes[1].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=144, transparent=shade == "dark")
        plt.close(figure)


if __name__ == "__main__":
    found = curves(records())
    for shade in INK:
        draw(found, shade, DOCS / f"front-{shade}.png")

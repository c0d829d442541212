"""Runs in, figures out; nothing is trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from cdgrab.paper.records import Runs
from cdgrab.paper.train import EpochRecord

# Distinguishable with any colour vision (Okabe and Ito).
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]


def comparison(runs: Runs, path: Path, *, floors: dict[str, float], title: str) -> None:
    """Loss against epochs, loss against seconds, herding bound; a row for every experiment and number of workers."""
    settings = list(dict.fromkeys((config.name, config.workers) for config in runs))
    orders = list(dict.fromkeys(config.order for config in runs))
    figure, grid = plt.subplots(len(settings), 3, figsize=(12, 2.7 * len(settings) + 0.6), squeeze=False)
    for axes, (name, workers) in zip(grid, settings, strict=True):
        floor = floors.get(name, 0.0)
        for colour, order in zip(COLOURS, orders, strict=False):
            seeds = [
                records
                for config, records in runs.items()
                if (config.name, config.workers, config.order) == (name, workers, order)
            ]
            losses = np.array([[record.loss - floor for record in records] for records in seeds])
            bounds = np.array([[record.herding_bound for record in records] for records in seeds])
            epochs = [record.epoch for record in seeds[0]]
            _band(axes[0], epochs, losses, colour, order)
            _band(axes[1], _mean_seconds(seeds), losses, colour, order)
            _band(axes[2], epochs, bounds, colour, order)
        loss_name = "loss above the minimum" if name in floors else "training loss"
        for axis, across, up in zip(
            axes, ("epochs", "seconds", "epochs"), (loss_name, loss_name, "herding bound"), strict=True
        ):
            axis.set(yscale="log", xlabel=across, ylabel=up)
            axis.grid(alpha=0.3, which="both", linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        if name not in floors:
            # Without a floor the start dwarfs everything; show where the orders part.
            here = [records for config, records in runs.items() if (config.name, config.workers) == (name, workers)]
            late = [record.loss for records in here for record in records[min(3, len(records) - 1) :]]
            for axis in axes[:2]:
                axis.set(yscale="linear", ylim=(min(late) * 0.99, max(late) * 1.01))
        axes[1].set_title(f"{name}, {workers} workers", fontsize=11)
    grid[0, 0].legend(frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=88)
    plt.close(figure)


def _band(axis: Axes, across: list[Any], values: npt.NDArray[np.float64], colour: str, label: str) -> None:
    """Geometric mean over seeds, and the range they span."""
    axis.plot(across, np.exp(np.log(values).mean(0)), color=colour, label=label, linewidth=1.6)
    axis.fill_between(across, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)


def _mean_seconds(seeds: list[list[EpochRecord]]) -> list[float]:
    return [float(np.mean([record.seconds for record in epoch])) for epoch in zip(*seeds, strict=True)]

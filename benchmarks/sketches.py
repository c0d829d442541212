"""What a sketch of a gradient gives up: a table and a figure from the records of `cdgrab paper sketches`.

    cdgrab paper sketches --epochs 40 --data DIR --device cuda
    python -m benchmarks.sketches [FOLDER ...]

By default the records that are kept with the documentation. Nothing is trained here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks import report
from cdgrab.paper.records import Run, load_all

KEPT = Path("docs/results")
FIGURE = Path("docs/per_example.png")
LENGTHS = (4096, 1024, 256)
BLUES = dict(zip(LENGTHS, ("#1b4f72", "#2e86c1", "#85c1e9"), strict=True))
EPOCHS = (10, 20, 30, 40)
LAST = range(31, 41)  # over which differences are averaged: from one epoch to the next a loss moves by 0.02
SMOOTH = 5

Runs = dict[str, dict[int, dict[int, float]]]  # loss by contender, seed and epoch


def losses(runs: list[Run]) -> Runs:
    """Of runs with 64 workers: random reshuffling, exact ordering, and sketches."""
    found: Runs = {}
    for run in runs:
        if run.config.workers == 64 and run.config.order in ("rr", "cd-grab"):
            name = "rr" if run.config.order == "rr" else run.config.source
            found.setdefault(name, {})[run.config.seed] = {record.epoch: record.loss for record in run.epochs}
    return found


def table(found: Runs) -> str:
    """Losses, seeds side by side, and how far they are below those of `rr` with the same seed in the end."""
    kinds = [f"{kind}:{length}" for kind in ("sketch", "random-sketch") for length in LENGTHS]
    rows = []
    for name in ("rr", "exact", *kinds):
        seeds = [found[name][seed] for seed in sorted(found[name])]
        cells = [" / ".join(f"{seed[epoch]:.3f}" for seed in seeds) for epoch in EPOCHS]
        gains = {seed: fmean(found["rr"][seed][e] - run[e] for e in LAST) for seed, run in sorted(found[name].items())}
        cells.append(" / ".join(f"{gain:.3f}" for gain in gains.values()) if name != "rr" else "")
        kind, _, length = name.partition(":")
        words = {"rr": "none (`rr`)", "exact": "exact", "sketch": "fitted sketch", "random-sketch": "random sketch"}
        rows.append([f"{words[kind]}{f' of {length}' if length else ''}", *cells])
    header = ["gradients", *(f"loss at {epoch}" for epoch in EPOCHS), f"below `rr`, epochs {LAST[0]} to {LAST[-1]}"]
    return report.table(header, rows)


def draw(found: Runs, path: Path) -> None:
    """Loss minus that of random reshuffling with the same seed, a running mean, against epochs."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, kind in zip(axes, ("sketch", "random-sketch"), strict=True):
        axis.axhline(0, color="#888888", linewidth=1.2, label="random reshuffling")
        lines = [("exact", "exact", "#D55E00"), *((f"{kind}:{n}", f"sketch of {n:,}", BLUES[n]) for n in LENGTHS)]
        for name, label, colour in lines:
            for seed, run in found[name].items():
                gaps = [run[epoch] - found["rr"][seed][epoch] for epoch in sorted(run)]
                smooth = [fmean(gaps[i - SMOOTH : i]) for i in range(SMOOTH, len(gaps) + 1)]
                axis.plot(
                    [i - SMOOTH / 2 - 0.5 for i in range(SMOOTH, len(gaps) + 1)],
                    smooth,
                    color=colour,
                    linestyle="-" if seed == 0 else "--",
                    linewidth=1.4,
                    label=label if seed == 0 else None,
                )
        axis.set(title={"sketch": "fitted projections", "random-sketch": "random projections"}[kind], xlabel="epochs")
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(top=0.032)  # room for the legend
    axes[1].legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    axes[0].set_ylabel(f"training loss minus that of random reshuffling\n(mean of {SMOOTH} epochs)")
    figure.suptitle("LeNet on CIFAR-10 (JPEG re-coded), 64 workers; seed 0 solid, seed 1 dashed", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main() -> None:
    """Draw the figure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=[KEPT / "sketches", KEPT / "records" / "cifar10"])
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    found = losses([run for folder in options.folders for run in load_all(folder)])
    draw(found, options.figure)
    print(table(found))


if __name__ == "__main__":
    main()

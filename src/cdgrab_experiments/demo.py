"""`make demo`: does a balanced order beat random reshuffling? On digits, in about two minutes, with a page to look at.

python -m cdgrab_experiments.demo [--results DIR] [--seeds N] [--epochs N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cdgrab_experiments import data, words
from cdgrab_experiments.batch import run_all
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.compare import Comparison, compare
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.report import TONES, write_report
from cdgrab_experiments.runner import Interrupted, Place, check_writable

REGIME = (
    "one example per worker and step, plain SGD with a constant step, L2 1e-3; smooth losses whose gradients change "
    "little from epoch to epoch"
)
LEGEND = (
    "Final training loss, mean over seeds; of softmax, above the smallest possible one. Share of rr's epochs and "
    "seconds: until cd-grab's loss stays at or below rr's final one; ± half of the 95 % interval."
)
# A step per example of 0.05 for the convex problem; a quarter of it for the network, whose curvature is larger.
STEP_SIZES = {("softmax", 4): 0.2, ("softmax", 16): 0.8, ("mlp", 4): 0.05, ("mlp", 16): 0.2}


def configs(seeds: int, epochs: int) -> list[RunConfig]:
    """Every run of the demo."""
    return [
        resolve(
            "digits",
            Choices(variant=variant, order=order, workers=workers, batch_size=workers, lr=lr, epochs=epochs, seed=seed),
        )
        for (variant, workers), lr in STEP_SIZES.items()
        for seed in range(seeds)
        for order in ("rr", "cd-grab")
    ]


def summary(comparisons: list[Comparison]) -> Table:
    """One line for every setting."""
    shown = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("", "loss, rr", "cd-grab", "rr's epochs", "rr's seconds", ""):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    ordered = sorted(comparisons, key=lambda c: list(STEP_SIZES).index((c.setting.variant, c.setting.workers)))
    for comparison in ordered:
        rows = [comparison.row(name) for name in ("rr", "cd-grab")]
        losses = [words.number(final.mean, 3) if row and (final := row.above or row.final) else "" for row in rows]
        ours = rows[1]
        shares = [words.interval(share) for share in (ours.epochs_ratio, ours.seconds_ratio)] if ours else ["", ""]
        tone = next((TONES[v.tone] for v in words.verdicts(comparison) if v.contender == "cd-grab"), "")
        shown.add_row(f"{comparison.setting.variant}, {comparison.setting.workers} workers", *losses, *shares, tone)
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m cdgrab_experiments.demo", description="cd-grab against rr on digits"
    )
    parser.add_argument("--results", type=Path, default=Path("results/demo"), help="where results go")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each setting")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of each run")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.epochs < 1:
        parser.error(f"--seeds is {options.seeds} and --epochs {options.epochs}; both must be at least 1")
    try:
        check_writable(options.results)
    except ValueError as error:
        parser.error(str(error))
    console, todo = Console(), configs(options.seeds, options.epochs)
    console.print(f"[bold]Digits[/], 1,536 images, {len(todo)} runs. Regime: {REGIME}.\n", highlight=False)
    try:
        # A line for every run would push the result off the screen; where there is a terminal, a bar comes and goes.
        board = console if console.is_terminal else Console(quiet=True)
        runs = run_all(todo, Place(options.results, data.folder(None)), board)
        console.print(summary(compare(runs)), highlight=False)
        console.print(f"\n{LEGEND}\n", style="dim", highlight=False)
        page = write_report(options.results, options.results)
    except Interrupted as stopped:
        console.print(f"{stopped} rm -r {options.results} begins anew.", highlight=False, markup=False)
        return 130
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        parser.error(str(error))
    console.print(f"A page to look at: {page}", highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

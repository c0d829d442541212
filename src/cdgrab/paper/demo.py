"""`make demo`: does a balanced order beat random reshuffling? On digits, in about a minute and a half.

python -m cdgrab.paper.demo [--results DIR] [--seeds N] [--epochs N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import cdgrab
from cdgrab.paper import plots, records
from cdgrab.paper.compare import Row, compare
from cdgrab.paper.records import Runs
from cdgrab.paper.tasks import digits
from cdgrab.paper.train import RunConfig, train

REGIME = (
    "one example per worker and step, plain SGD with a constant step, L2 1e-3; smooth losses whose gradients change "
    "little from epoch to epoch"
)
SOFTMAX, MLP = "softmax regression", "small MLP"
# A step per example of 0.05 for the convex problem; a quarter of it for the network, whose curvature is larger.
STEP_SIZES = {(SOFTMAX, 4): 0.2, (SOFTMAX, 16): 0.8, (MLP, 4): 0.05, (MLP, 16): 0.2}
MODELS = {SOFTMAX: digits.SOFTMAX_REGRESSION, MLP: digits.SMALL_MLP}
ORDERS = ("rr", "cd-grab")


def configs(seeds: int, epochs: int) -> list[RunConfig]:
    """Every run of the demo."""
    return [
        RunConfig(name, MODELS[name], order, workers, step, epochs, seed)
        for (name, workers), step in STEP_SIZES.items()
        for seed in range(seeds)
        for order in ORDERS
    ]


def run(console: Console, todo: list[RunConfig]) -> Runs:
    """Run everything, with a bar that shows where it is."""
    x, y = digits.load()
    cdgrab.balance_vectors(torch.zeros(1, 2, 3))  # compile before the clock runs
    runs: Runs = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=sum(config.epochs for config in todo))
        for config in todo:
            runs[config] = []
            for record in train(config, x, y):
                runs[config].append(record)
                what = f"{config.name}, {config.workers:2} workers, seed {config.seed}, {config.order:7}"
                progress.update(bar, description=f"{what} loss {record.loss:.4f}", advance=int(record.epoch > 0))
    return runs


def table(rows: list[Row], floors: dict[str, float]) -> Table:
    """The comparison as a table."""
    table = Table(title="cd-grab against random reshuffling (mean ± deviation over seeds)", title_justify="left")
    table.add_column("model")
    table.add_column("workers", justify="right")
    table.add_column("order")
    table.add_column("final loss", justify="right")
    table.add_column("epochs until below rr's final loss", justify="right")
    table.add_column("seconds", justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.workers),
            row.order,
            format(row.final, ".5f") + (" *" if row.name in floors else ""),
            "not every seed" if row.epochs is None else format(row.epochs, ".1f"),
            "not every seed" if row.seconds is None else format(row.seconds, ".2f"),
            end_section=row.order == ORDERS[-1],
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(prog="python -m cdgrab.paper.demo", description="cd-grab against rr on digits")
    parser.add_argument("--results", type=Path, default=Path("results/demo"), help="where results go")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each setting")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of each run")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.epochs < 1:
        parser.error(f"--seeds is {options.seeds} and --epochs {options.epochs}; both must be at least 1")
    try:
        options.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot make the folder {options.results}: {error.strerror}; choose another with --results")

    torch.set_num_threads(1)  # the models are tiny; a second thread costs more than it gives
    console = Console()
    console.print(f"[bold]Digits[/], {digits.NUM_EXAMPLES} images. Regime: {REGIME}.", highlight=False)
    try:
        runs = run(console, configs(options.seeds, options.epochs))
    except KeyboardInterrupt:
        console.print("Stopped; nothing was written.")
        return 130
    x, y = digits.load()
    floors = {SOFTMAX: digits.minimum(digits.SOFTMAX_REGRESSION, x, y)}
    console.print(table(compare(runs, rival="rr", floors=floors), floors))
    console.print(f"* above the smallest possible loss, {floors[SOFTMAX]:.6f}", highlight=False)
    records.save(runs, options.results / "records.jsonl")
    title = f"Digits: cd-grab and random reshuffling, {options.seeds} seeds (line: mean, band: range)"
    plots.comparison(runs, options.results / "comparison.png", floors=floors, title=title)
    console.print(f"Figure   {options.results / 'comparison.png'}", highlight=False)
    console.print(f"Records  {options.results / 'records.jsonl'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

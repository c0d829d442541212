"""The command `cdgrab`: parse and call, no science.

Exit status: 0 done; 1 a run ended early because its loss was not finite, or a check failed; 2 something asked for
cannot be (the message says what to do); 130 interrupted (what was done is saved).
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import cdgrab
from cdgrab import ORDERS, RULES
from cdgrab_experiments import data as data_sets
from cdgrab_experiments.batch import run_all
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.download import download as fetch
from cdgrab_experiments.interrupts import interruptible
from cdgrab_experiments.recipes import HERDING, HERDING_TITLE, RECIPES, find_recipe
from cdgrab_experiments.records import load_readable
from cdgrab_experiments.runner import Interrupted, Place, check_writable, estimate
from cdgrab_experiments.tasks import TASKS
from cdgrab_experiments.terminal import show
from cdgrab_experiments.theory.cli import verify
from cdgrab_experiments.writers import WRITERS

app = typer.Typer(
    help="Experiments with gradient-balanced data ordering: run, compare, report.",
    epilog="Exit status: 0 done, 1 a run diverged or a check failed, 2 bad input, 130 interrupted (work is saved).",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="verify")(verify)

RUN_PANEL, TRAIN_PANEL, PLACE_PANEL = "What is run", "How it is trained (defaults: the task's own)", "Where"
_NAMES = f"{', '.join(ORDERS)}; or a rule ({', '.join(RULES)}), which is cd-grab with that rule; or ORDER+RULE"
Order = Annotated[str, typer.Option(help=f"One of {_NAMES}.", rich_help_panel=RUN_PANEL)]
Orders = Annotated[str, typer.Option(help=f"Some, with commas, of {_NAMES}.", rich_help_panel=RUN_PANEL)]
Seed = Annotated[int, typer.Option(help="Seed of model, first order and split.", rich_help_panel=RUN_PANEL)]
Seeds = Annotated[int, typer.Option(help="How many seeds, from 0.", min=1, rich_help_panel=RUN_PANEL)]
Variant = Annotated[
    str | None, typer.Option(help="Variant of the task, where it has several.", rich_help_panel=RUN_PANEL)
]
Source = Annotated[str, typer.Option(help="exact, or sketch:LENGTH for short rows.", rich_help_panel=RUN_PANEL)]
Partition = Annotated[str, typer.Option(help="iid, sorted or dirichlet:ALPHA.", rich_help_panel=RUN_PANEL)]
Workers = Annotated[int | None, typer.Option(help="Number of workers.", rich_help_panel=TRAIN_PANEL)]
Batch = Annotated[
    int | None, typer.Option(help="Examples in a step, of all workers together.", rich_help_panel=TRAIN_PANEL)
]
Epochs = Annotated[int | None, typer.Option(help="Epochs.", rich_help_panel=TRAIN_PANEL)]
Optimizer = Annotated[str | None, typer.Option(help="sgd, adam or adamw.", rich_help_panel=TRAIN_PANEL)]
Lr = Annotated[float | None, typer.Option(help="Step size.", rich_help_panel=TRAIN_PANEL)]
Momentum = Annotated[float | None, typer.Option(help="Of SGD.", rich_help_panel=TRAIN_PANEL)]
Decay = Annotated[float | None, typer.Option(help="Weight decay.", rich_help_panel=TRAIN_PANEL)]
Schedule = Annotated[str | None, typer.Option(help="constant, step:N:F or cosine.", rich_help_panel=TRAIN_PANEL)]
Data = Annotated[
    Path | None, typer.Option(help="Data folder; else $CDGRAB_DATA, else ~/.cache/cdgrab.", rich_help_panel=PLACE_PANEL)
]
Results = Annotated[Path, typer.Option(help="Folder for records.", rich_help_panel=PLACE_PANEL)]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.", rich_help_panel=PLACE_PANEL)]
Jobs = Annotated[
    int, typer.Option(help="Runs at a time; their seconds then tell nothing.", min=1, rich_help_panel=PLACE_PANEL)
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would be run and how long it would take.", rich_help_panel=PLACE_PANEL),
]
Log = Annotated[
    list[str] | None, typer.Option(help="Also write for tensorboard or wandb (offline).", rich_help_panel=PLACE_PANEL)
]


@app.command(
    epilog="Example: cdgrab run hmda --epochs 10. On real ranks: torchrun --nproc-per-node=4 -m cdgrab run hmda"
)
def run(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    order: Order = "cd-grab",
    seed: Seed = 0,
    variant: Variant = None,
    source: Source = "exact",
    partition: Partition = "iid",
    workers: Workers = None,
    batch: Batch = None,
    epochs: Epochs = None,
    optimizer: Optimizer = None,
    lr: Lr = None,
    momentum: Momentum = None,
    weight_decay: Decay = None,
    schedule: Schedule = None,
    data: Data = None,
    results: Results = Path("results"),
    device: Device = "auto",
    dry_run: DryRun = False,
    log: Log = None,
) -> None:
    """Train one task once."""
    choices = Choices(
        variant, order, source, workers, batch, epochs, seed, optimizer, lr, momentum, weight_decay, schedule, partition
    )
    _do([resolve(task, choices)], _place(results, data, device), dry_run=dry_run, log=log)


@app.command(epilog="Example: cdgrab compare hmda --orders cd-grab,rr,pair,halving --seeds 5 --workers 4")
def compare(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    orders: Orders = "rr,cd-grab",
    seeds: Seeds = 3,
    variant: Variant = None,
    source: Source = "exact",
    partition: Partition = "iid",
    workers: Workers = None,
    batch: Batch = None,
    epochs: Epochs = None,
    optimizer: Optimizer = None,
    lr: Lr = None,
    momentum: Momentum = None,
    weight_decay: Decay = None,
    schedule: Schedule = None,
    data: Data = None,
    results: Results = Path("results"),
    device: Device = "auto",
    jobs: Jobs = 1,
    dry_run: DryRun = False,
    log: Log = None,
) -> None:
    """Train a task with several orders and seeds; what is there already is not done again."""
    choices = Choices(
        variant, "", source, workers, batch, epochs, 0, optimizer, lr, momentum, weight_decay, schedule, partition
    )
    names = [name.strip() for name in orders.split(",") if name.strip()]
    if not names:
        raise ValueError("--orders is empty; name some, as in --orders rr,cd-grab")
    todo = [resolve(task, replace(choices, order=name, seed=seed)) for seed in range(seeds) for name in names]
    _do(list(dict.fromkeys(todo)), _place(results, data, device), jobs=jobs, dry_run=dry_run, log=log)


@app.command(epilog="Example: cdgrab paper hmda, or cdgrab paper --list")
def paper(
    figure: Annotated[str | None, typer.Argument(help="A figure or table of the paper.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name them all.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds; by default as many as the paper used.", min=1)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs; by default as many as the paper used.", min=1)] = None,
    data: Data = None,
    results: Results = Path("results"),
    device: Device = "auto",
    jobs: Jobs = 1,
    dry_run: DryRun = False,
    log: Log = None,
) -> None:
    """Repeat a figure or table of the paper with its own settings."""
    console = Console()
    if list_ or figure is None:
        listing = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("figure", "runs", "what it shows"):
            listing.add_column(column, justify="right" if column == "runs" else "left")
        for recipe in RECIPES.values():
            listing.add_row(recipe.name, str(len(recipe.configs())), recipe.title)
        listing.add_row(HERDING, "-", HERDING_TITLE)
        console.print(listing)
        if not list_:
            raise ValueError("no figure is named; choose one of the above, as in cdgrab paper hmda")
        return
    if figure == HERDING:
        if dry_run:
            console.print("cdgrab verify herding: about 2 minutes")
            return
        verify("herding", out=results / "theory")
        return
    _do(find_recipe(figure).configs(seeds, epochs), _place(results, data, device), jobs=jobs, dry_run=dry_run, log=log)


@app.command(epilog="Example: cdgrab report results/hmda --out hmda-report")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with records, of one task or several.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the page and figures; by default the same.")] = None,
) -> None:
    """Write one page with charts, tables and commands; beside it the tables as text and figures as PNG and PDF."""
    from cdgrab_experiments.report import write_report

    left_out: list[str] = []
    page = write_report(folder, out or folder, left_out.append)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in left_out:
        console.print(line)
    console.print(f"Written to {page}")
    if left_out:
        raise typer.Exit(1)


@app.command(epilog="Example: cdgrab data --download m4-weekly")
def data(
    folder: Annotated[
        Path | None, typer.Option("--data", help="Data folder; else $CDGRAB_DATA, else ~/.cache/cdgrab.")
    ] = None,
    download: Annotated[list[str] | None, typer.Option(help="Data sets to download, by name.")] = None,
) -> None:
    """Say which data are there, where they are looked for and how to get the others."""
    console, place = Console(), data_sets.folder(folder)
    for name in download or []:
        data_sets.find_set(name)
        from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

        with Progress(
            *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=console
        ) as bars:
            bar = bars.add_task(name)
            fetch(name, place, lambda done, total, bar=bar, bars=bars: bars.update(bar, completed=done, total=total))  # type: ignore[misc]
    console.print(
        f"Data folder: {place} (--data, else CDGRAB_DATA, else ~/.cache/cdgrab)", highlight=False, soft_wrap=True
    )
    listing = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("data set", "state", "MB", "where, or how to get it"):
        listing.add_column(column, justify="right" if column == "MB" else "left")
    for entry in data_sets.inventory(place):
        where = str(entry.where) if entry.state == "present" else entry.how
        if entry.state == "incomplete":
            where = f"{', '.join(entry.missing)} not in {entry.where}; {where}"
        listing.add_row(entry.name, entry.state, f"{entry.size / 1e6:.1f}", where)
    console.print(listing, highlight=False)


def _place(results: Path, data: Path | None, device: str) -> Place:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())):
        raise ValueError(f"unknown device {device!r}; choose cpu, cuda, cuda:NUMBER or auto")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {device}, but PyTorch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    return Place(results, data_sets.folder(data), device)


def _do(
    todo: list[RunConfig], place: Place, *, jobs: int = 1, dry_run: bool = False, log: list[str] | None = None
) -> None:
    for name in log or []:
        if name not in WRITERS:
            raise ValueError(f"unknown --log {name!r}; choose one of {', '.join(WRITERS)}")
    console = Console(quiet=_rank() > 0)
    if _rank() >= 0 and jobs > 1:
        raise ValueError("--jobs is for one process, and ranks of torchrun share every run; leave it out")
    place = replace(place, jobs=jobs)
    if dry_run:
        _foretell(todo, place, console, jobs)
        return
    check_writable(place.results)
    if _rank() >= 0:
        if torch.cuda.is_available() and place.device == "cuda":
            place = replace(place, device=f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(place.device)
        dist.init_process_group("nccl" if place.device.startswith("cuda") else "gloo")
        atexit.register(time.sleep, 0.1)  # gloo's threads need Python to end
    try:
        writers = [WRITERS[name](place.results) for name in log or [] if _rank() <= 0]
        runs = run_all(todo, place, console, jobs=jobs, writers=writers)
    except KeyboardInterrupt:  # while data were read, say
        raise Interrupted(None, 0) from None
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    show(runs, console)
    console.print(
        f"Records in {place.results}; a page of them: cdgrab report {place.results}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if any(run.info.stopped for run in runs):
        raise typer.Exit(1)


def _foretell(todo: list[RunConfig], place: Place, console: Console, jobs: int) -> None:
    listing = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("run", "epochs", "about"):
        listing.add_column(column, justify="left" if column == "run" else "right")
    known: dict[RunConfig, float] = {}
    runs = load_readable(place.results)[0] if place.results.exists() else []
    there = {run.config for run in runs if run.complete}
    total = 0.0
    for config in todo:
        alike = replace(config, seed=0)
        if config in there:
            about = 0.0
        else:
            if alike not in known:
                known[alike] = estimate(alike, place)
            about = known[alike]
        total += about
        name = f"{config.title}, {config.contender}, seed {config.seed}"
        listing.add_row(name, str(config.epochs), "is there" if config in there else _duration(about))
    console.print(listing, highlight=False)
    console.print(
        f"{len(todo)} runs, about {_duration(total / jobs)} of training on {place.device}; nothing was run.",
        highlight=False,
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _rank() -> int:
    """Which rank torchrun started; -1 without it."""
    return int(os.environ.get("RANK", -1)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else -1


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cdgrab {cdgrab.__version__}, torch {torch.__version__}")
        raise typer.Exit


FIRST = """cdgrab {}: gradient-balanced data ordering for PyTorch. Three commands to try:

  cdgrab compare digits    a balanced order against random reshuffling; needs no data
  cdgrab report results    a page with charts of all runs so far
  cdgrab paper --list      the figures of the paper, one command each

All commands: cdgrab --help"""


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  acts by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(FIRST.format(cdgrab.__version__))


# Of the package click, or of the copy of it that newer releases of typer have.
_UsageError: Any = typer.BadParameter.__base__


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; errors of the user's become one line, which ends with what to do, and a status."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    interruptible()
    try:
        status = app(arguments, prog_name="cdgrab", standalone_mode=False)
    except Interrupted as stopped:
        errors.print(str(stopped))
        sys.exit(130)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "cdgrab"
        errors.print(f"Error: {error.format_message().rstrip('.')}; see {command} --help")
        sys.exit(2)
    except OSError as error:
        errors.print(f"Error: {error}; check that path, or choose another with --results, --data or --out")
        sys.exit(2)
    except ValueError as error:
        errors.print(f"Error: {error}")
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)

"""`cdgrab verify NAME`: parse, run, print, write. No science here.

Exit codes: 0 every guard holds; 1 a guard failed; 2 the command line or the folder is wrong; 3 with `--strict`, all
guards hold but a measurement lies outside what theory promises; 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import difflib
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cdgrab_experiments.theory import report
from cdgrab_experiments.theory.experiments import EXPERIMENTS
from cdgrab_experiments.theory.progress import Bar
from cdgrab_experiments.theory.report import Duration, Outcome
from cdgrab_experiments.theory.settings import FULL, QUICK

NAMES = [*EXPERIMENTS, "all"]


def verify(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(NAMES)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: a minute instead of fifteen.")] = False,
    out: Annotated[Path, typer.Option(help="Where figures and tables go.")] = Path("results/theory"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if a measurement lies outside theory.")] = False,
) -> None:
    """Hold the theory against measurements: a figure, a table, and verdicts with their margins.

    Guards (this code must do it) and measurements (a theorem promises it) are told apart; a failed guard exits with 1.
    """
    chosen = _choose(name)
    _make_folder(out)
    torch.set_num_threads(1)  # everything here is small; threads would only wait for each other
    console = Console()
    written: list[Path] = []
    outcomes: dict[str, Outcome] = {}
    took: dict[str, Duration] = {}
    bar = Bar(console)
    try:
        for each in chosen:
            start = time.perf_counter(), time.process_time()
            with bar.progress:
                outcomes[each] = EXPERIMENTS[each](QUICK if quick else FULL, bar)
            took[each] = Duration(time.perf_counter() - start[0], time.process_time() - start[1])
            report.show(console, each, outcomes[each], took[each])
            command = f"cdgrab verify {each}{' --quick' if quick else ''}"
            page = report.markdown(each, outcomes[each], command=command, took=took[each])
            outcomes[each].draw(out / f"{each}.png")
            report.write(out / f"{each}.md", page)
            written += [out / f"{each}.png", out / f"{each}.md"]
        if name == "all":
            command = f"cdgrab verify all{' --quick' if quick else ''}"
            report.write(out / "summary.md", report.summary(outcomes, took, command=command))
            written.append(out / "summary.md")
    except KeyboardInterrupt:
        bar.stop.set()
        _stop(130, f"Stopped. {_told(written)}")
    except OSError as error:
        _stop(
            2, f"cannot write to {out}: {error.strerror or error}; choose another folder with --out. {_told(written)}"
        )
    _conclude(console, outcomes, written, strict=strict)


def _choose(name: str) -> list[str]:
    if name == "all":
        return list(EXPERIMENTS)
    if name in EXPERIMENTS:
        return [name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), NAMES, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    _stop(2, f"unknown experiment {name!r}{meant} Choose one of {', '.join(NAMES)}.")
    return []


def _make_folder(out: Path) -> None:
    """Before the work, not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _stop(2, f"cannot make the folder {out}: {error.strerror}; choose another with --out")
    if not os.access(out, os.W_OK | os.X_OK):
        _stop(2, f"the folder {out} is not writable; choose another with --out")


def _conclude(console: Console, outcomes: dict[str, Outcome], written: list[Path], *, strict: bool) -> None:
    found = [(name, verdict) for name, outcome in outcomes.items() for verdict in outcome.verdicts]
    failed = [(name, verdict) for name, verdict in found if verdict.failed]
    outside = [(name, verdict) for name, verdict in found if verdict.outside]
    guards = sum(verdict.guards for _, verdict in found)
    console.print(f"\n{_told(written)}", highlight=False, soft_wrap=True)
    measured = len(found) - guards
    told = f"{guards - len(failed)} of {guards} guards hold; {len(outside)} of {measured} measurements lie outside."
    console.print(told, highlight=False)
    for name, verdict in failed:
        console.print(
            f"FAILS  {name}: {verdict.claim}: found {verdict.found}, expected {verdict.wanted}",
            style="red",
            soft_wrap=True,
        )
    if failed:
        raise typer.Exit(1)
    if strict and outside:
        raise typer.Exit(3)


def _told(written: list[Path]) -> str:
    return f"Written: {', '.join(map(str, written))}" if written else "Nothing was written."


def _stop(code: int, message: str) -> None:
    """One line for people on standard error, a code for scripts."""
    typer.echo(message, err=True)
    raise typer.Exit(code)

"""What an experiment leaves behind, on the screen and on disk."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as RichTable

import cdgrab
from cdgrab_experiments import compiled
from cdgrab_experiments.theory.verdicts import Verdict

COLOURS = {"holds": "green", "inside": "green", "steeper": "green", "outside": "yellow", "FAILS": "bold red"}


@dataclass(frozen=True)
class Table:
    """A table, for the screen and for Markdown. The first `left` columns are words."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Outcome:
    """What an experiment found.

    Attributes:
        title: One line: what was done, with its sizes.
        seeds: Which seeds, in words.
        tables: What was measured.
        verdicts: What follows.
        draw: Writes the figure.
        notes: What the reader should know when reading the tables.
    """

    title: str
    seeds: str
    tables: list[Table]
    verdicts: list[Verdict]
    draw: Callable[[Path], None]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Duration:
    """Seconds that passed, and seconds of CPU time: on a machine with other work the two have little in common."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.0f} s ({self.cpu:.0f} s of CPU time)"


def show(console: Console, name: str, outcome: Outcome, took: Duration) -> None:
    """Print the tables and the verdicts."""
    console.print(f"\n[bold]{name}[/]  {outcome.title}; {took}", highlight=False)
    for table in [*outcome.tables, verdict_table(outcome.verdicts)]:
        rich = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            rich.add_column(column, justify="left" if i < table.left else "right", overflow="fold")
        for row in table.rows:
            colour = COLOURS.get(row[-1])
            rich.add_row(*row[:-1], f"[{colour}]{row[-1]}[/]" if colour else row[-1])
        console.print(rich)
    for note in outcome.notes:
        console.print(f"Note: {note}", highlight=False)


def markdown(name: str, outcome: Outcome, *, command: str, took: Duration) -> str:
    """The page of one experiment."""
    lines = [f"# {name}", "", f"{outcome.title}.", "", f"![{name}]({name}.png)", ""]
    for table in [*outcome.tables, verdict_table(outcome.verdicts)]:
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    if outcome.notes:
        lines += [*(f"- {note}" for note in outcome.notes), ""]
    lines += [f"Made by `{command}` in {took}. Seeds: {outcome.seeds}. {environment()}.", ""]
    return "\n".join(lines)


def summary(outcomes: dict[str, Outcome], took: dict[str, Duration], *, command: str) -> str:
    """The page of all experiments: what each took, and every verdict."""
    lines = ["# Summary", "", "| experiment | seconds | of CPU time | guards that hold | measurements inside |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, outcome in outcomes.items():
        guards = [verdict for verdict in outcome.verdicts if verdict.guards]
        rest = [verdict for verdict in outcome.verdicts if not verdict.guards]
        held, inside = sum(not v.failed for v in guards), sum(not v.outside for v in rest)
        cells = f"{took[name].wall:.0f} | {took[name].cpu:.0f} | {held} of {len(guards)} | {inside} of {len(rest)} |"
        lines.append(f"| [{name}]({name}.md) | {cells}")
    lines += ["", "Outside:", ""]
    for name, outcome in outcomes.items():
        for v in outcome.verdicts:
            if v.outside or v.failed:
                lines.append(f"- {name}: {v.claim}: found {v.found}, expected {v.wanted} ({v.word})")
    total = Duration(sum(each.wall for each in took.values()), sum(each.cpu for each in took.values()))
    return "\n".join([*lines, "", f"Made by `{command}` in {total}. {environment()}.", ""])


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Verdicts as a table. Guards come first: they say whether the rest is worth reading."""
    ordered = sorted(verdicts, key=lambda verdict: not verdict.guards)
    rows = [[v.claim, "guard" if v.guards else "measured", v.found, v.wanted, v.margin, v.word] for v in ordered]
    return Table("Verdicts", ["claim", "kind", "found", "expected", "margin", "verdict"], rows, left=2)


def markdown_table(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    rule = ["---" if i < table.left else "---:" for i in range(len(table.columns))]
    return ["| " + " | ".join(cells) + " |" for cells in [table.columns, rule, *table.rows]]


def environment() -> str:
    """Versions and hardware, in one line."""
    numba = "with numba" if compiled.available() else "without numba"
    return (
        f"cdgrab {cdgrab.__version__} ({numba}), torch {torch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores ({_cpu()})"
    )


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unnamed"


def write(path: Path, text: str) -> None:
    """Write to a temporary name first, so that a file is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)

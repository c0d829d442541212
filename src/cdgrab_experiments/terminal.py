"""Comparisons on a terminal: tables, verdicts in words, and what went wrong."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cdgrab_experiments.compare import RIVAL, compare
from cdgrab_experiments.records import Run
from cdgrab_experiments.words import LEGEND, table, verdicts


def show(runs: list[Run], console: Console) -> None:
    """Tables and verdicts."""
    for comparison in compare(runs):
        found = table(comparison)
        shown = Table(title=escape(f"{comparison.title}: {comparison.any_run.info.data}"), title_justify="left")
        for number, column in enumerate(found.header):
            shown.add_column(escape(column), justify="right" if number else "left")
        for row in found.rows:
            shown.add_row(*(f"{escape(c.main)}\n[dim]{escape(c.sub)}[/]" if c.sub else escape(c.main) for c in row))
        console.print(shown, highlight=False)
        for text in [*(verdict.text for verdict in verdicts(comparison)), *comparison.notes]:
            console.print(f"- {text}", highlight=False, markup=False, soft_wrap=True)
    console.print(LEGEND.format(RIVAL), style="dim", highlight=False)
    for run in runs:
        if run.info.stopped:
            console.print(
                f"{run.config.title}, {run.config.contender}, seed {run.config.seed}: {run.info.stopped}",
                style="red",
                markup=False,
            )

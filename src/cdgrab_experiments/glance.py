"""All settings in one table: what ordering does in each, for the order the paper is about."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cdgrab_experiments import published
from cdgrab_experiments.compare import Comparison, Row
from cdgrab_experiments.words import ABSENT, Cell, Table, interval, outcome_cells

HEADER = [
    "",
    "seeds",
    "cd-grab's final loss less rr's",
    "verdict",
    "share of rr's epochs",
    "in the paper",
    "share of rr's seconds",
    "seconds per epoch over rr's",
]


def glance(comparisons: Sequence[Comparison]) -> Table:
    """One line per setting; the first cell leads to the setting's section on a page."""
    return Table(HEADER, [_line(comparison, f"#setting-{i}") for i, comparison in enumerate(comparisons)])


def stands_in(comparison: Comparison) -> bool:
    """Whether the data are not those they are named after."""
    lines = {run.info.data for runs in comparison.runs.values() for run in runs.values()}
    return any(re.search(r"stand[\s-]?in\b|stands in\b", line, re.IGNORECASE) for line in lines)


def _line(comparison: Comparison, link: str) -> list[Cell]:
    row, paper = comparison.row("cd-grab"), published.find(comparison.setting)
    title = Cell(comparison.title, "stand-in data" if stands_in(comparison) else "", link)
    if row is None:
        return [title, *[Cell(ABSENT)] * (len(HEADER) - 1)]
    return [
        title,
        Cell(str(row.tried)),
        *outcome_cells(row, comparison),
        _share(row, interval(row.epochs_ratio)),
        Cell(paper.epochs_ratio if paper and paper.epochs_ratio else ABSENT),
        _share(row, interval(row.seconds_ratio)),
        Cell(interval(row.pace)),
    ]


def _share(row: Row, said: str) -> Cell:
    if row.tried and not row.reached:
        return Cell("never")
    return Cell(said, f"{row.reached} of {row.tried} seeds" if row.reached < row.tried and said != ABSENT else "")

"""Comparisons in, a Markdown document out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cdgrab_experiments.beside import beside_the_paper
from cdgrab_experiments.compare import Comparison
from cdgrab_experiments.glance import glance
from cdgrab_experiments.words import LEGEND, Table, table, verdicts


def markdown(comparisons: Sequence[Comparison], left_out: Sequence[str] = ()) -> str:
    """All tables, verdicts and notes as a Markdown document; what comes from records stays text in it.

    Args:
        comparisons: What is shown.
        left_out: A line on every run that is not.
    """
    parts = ["# Comparison", *(LEGEND.format(rival) for rival in dict.fromkeys(c.rival for c in comparisons))]
    if len(comparisons) > 1:
        parts += ["## At a glance", _markdown_table(glance(comparisons))]
    for comparison in comparisons:
        said = [f"- {plain(text)}" for text in [*(v.text for v in verdicts(comparison)), *comparison.notes]]
        parts += [
            f"## {plain(comparison.title)}",
            plain(comparison.any_run.info.data),
            _markdown_table(table(comparison)),
        ]
        parts.append("\n".join(said))
        paper = beside_the_paper(comparison)
        if paper is not None:
            parts += [_markdown_table(paper.table) if paper.table.rows else "", plain(paper.remarks)]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {plain(line)}" for line in left_out)]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """`text` with whatever Markdown or HTML would take for markup escaped."""
    text = re.sub(r"([\\`*\[\]<>|~&#$]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))
    text = re.sub(r"(?i)(?<=[a-z])(?=://)|(?<=www)(?=\.)", r"\\", text)  # no address becomes a link by itself
    return re.sub(r"^(\d*)([-+=.)])(?=[-=\s]|$)", r"\1\\\2", text)  # nor a line a heading or an item of a list


def _markdown_table(found: Table) -> str:
    lines = [_markdown_row(found.header), "|---|" + "---:|" * (len(found.header) - 1)]
    lines += [_markdown_row([f"{c.main} ({c.sub})" if c.sub else c.main for c in row]) for row in found.rows]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"

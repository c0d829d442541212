"""Comparisons in, words out: figures with their uncertainty, a verdict in a sentence, the table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cdgrab_experiments.compare import Comparison, Estimate, Row

Tone = Literal["gain", "mixed", "none", "unknown"]
ABSENT = "—"
LEGEND = (
    "Losses and metrics: mean ± standard deviation over seeds, after the last epoch. Shares of {0}'s epochs and "
    "seconds: until the loss stays at or below {0}'s final one of the same seed, over all that {0} took; mean ± half "
    "of the 95 % interval of the mean over seeds (Student's t)."
)


@dataclass(frozen=True)
class Verdict:
    """What the figures say about a contender, in plain words."""

    contender: str
    tone: Tone
    text: str


@dataclass(frozen=True)
class Cell:
    """A figure, what to know about it, and where it leads on a page."""

    main: str
    sub: str = ""
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Header and cells, for pages, documents and terminals alike."""

    header: list[str]
    rows: list[list[Cell]]


def number(value: float, digits: int = 5) -> str:
    """A number with so many significant digits, in the shape people write it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{min(digits, 3) - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def spread(estimate: Estimate | None) -> str:
    """Mean and standard deviation, with two digits of the latter."""
    if estimate is None:
        return ABSENT
    return _with_error(estimate.mean, estimate.deviation)


def interval(estimate: Estimate | None) -> str:
    """Mean and half of its 95 % interval."""
    if estimate is None:
        return ABSENT
    return _with_error(estimate.mean, estimate.half_width, digits=2)


def table(comparison: Comparison) -> Table:
    """The figures of a setting; see `LEGEND`."""
    info = comparison.any_run.info
    known = any(row.above for row in comparison.rows)
    rival = comparison.rival
    header = ["order", "final loss", *(["above the minimum"] if known else []), f"final {info.metric}"]
    header += [f"share of {rival}'s epochs", f"share of {rival}'s seconds", "seconds per epoch"]
    rows = []
    for row in comparison.rows:
        seeds = f"{len(row.seeds)} seed{'s' * (len(row.seeds) != 1)}"
        count = f"{seeds}, {len(row.diverged)} diverged" if row.diverged else seeds
        cells = [Cell(row.contender, count), Cell(spread(row.final))]
        cells += [Cell(spread(row.above))] if known else []
        cells += [Cell(spread(row.metric)), *_target_cells(row), _pace_cell(row, rival)]
        rows.append(cells)
    return Table(header, rows)


def markdown(comparisons: Sequence[Comparison], left_out: Sequence[str] = ()) -> str:
    """All tables, verdicts and notes as a Markdown document; what comes from records stays text in it.

    Args:
        comparisons: What is shown.
        left_out: A line on every run that is not.
    """
    parts = ["# Comparison", *(LEGEND.format(rival) for rival in dict.fromkeys(c.rival for c in comparisons))]
    for comparison in comparisons:
        found = table(comparison)
        lines = [_markdown_row(found.header), "|---|" + "---:|" * (len(found.header) - 1)]
        lines += [_markdown_row([f"{c.main} ({c.sub})" if c.sub else c.main for c in row]) for row in found.rows]
        said = [f"- {plain(text)}" for text in [*(v.text for v in verdicts(comparison)), *comparison.notes]]
        parts += [f"## {plain(comparison.title)}", plain(comparison.any_run.info.data), "\n".join(lines)]
        parts.append("\n".join(said))
    if left_out:
        parts += ["## Left out", "\n".join(f"- {plain(line)}" for line in left_out)]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """`text` with whatever Markdown or HTML would take for markup escaped."""
    text = re.sub(r"([\\`*\[\]<>|~&#$]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))
    text = re.sub(r"(?i)(?<=[a-z])(?=://)|(?<=www)(?=\.)", r"\\", text)  # no address becomes a link by itself
    return re.sub(r"^(\d*)([-+=.)])(?=[-=\s]|$)", r"\1\\\2", text)  # nor a line a heading or an item of a list


def verdicts(comparison: Comparison) -> list[Verdict]:
    """A sentence or two for every contender but the rival."""
    rival = comparison.row(comparison.rival)
    return [_verdict(row, rival, comparison.rival) for row in comparison.rows if row.contender != comparison.rival]


def _verdict(row: Row, rival: Row | None, name: str) -> Verdict:
    who = row.contender
    if row.tried == 0:
        missing = (
            f"no run of {name} to compare it with" if rival is None else f"no finished run beside one of {name} yet"
        )
        ended = f" It ended at a loss of {number(row.final.mean)}." if row.final else ""
        return Verdict(who, "unknown", f"{who}: {missing}.{ended}")
    cost = _cost(row, name)
    if row.reached == 0:
        where = "its only seed" if row.tried == 1 else f"none of {row.tried} seeds"
        verb = "did not get" if row.tried == 1 else "got"
        return Verdict(who, "none", f"{who} did not help: {where} {verb} down to {name}'s final loss and stayed.{cost}")
    after = f"after {_share(row.epochs_ratio)} of the epochs"
    if row.seconds_ratio:
        count = row.seconds_ratio.count
        timed = f" (of {count} seed{'s' * (count != 1)})" if count < row.reached else ""
        after += f" and {_share(row.seconds_ratio)} of the seconds{timed}"
    if row.reached < row.tried:
        text = f"{who} reached {name}'s final loss in {row.reached} of {row.tried} seeds only; there {after}."
        return Verdict(who, "mixed", text + cost)
    seeds = "one seed" if row.tried == 1 else f"mean of {row.tried} seeds"
    text = f"{who} reached {name}'s final loss {after} ({seeds})."
    own = rival.epochs_ratio.mean if rival and rival.epochs_ratio else 1.0
    if row.tried == 1:
        return Verdict(who, "mixed", f"{text} One seed cannot tell a gain from chance.")
    if not _surely_below(row.epochs_ratio, own) and row.lower == row.both and _mean_below(row.epochs_ratio, own):
        few = f"{row.tried} seeds are too few to say by how much"
        return Verdict(who, "mixed", f"{text} Its loss ends below {name}'s in all of them, but {few}.{cost}")
    if not _surely_below(row.epochs_ratio, own):
        # A noisy rival settles below its own final loss before its last epoch: earlier than one is not yet earlier.
        settles = f" ({name} itself settles there after {_share(rival.epochs_ratio)})" if rival and own < 0.995 else ""
        return Verdict(who, "none", f"{text} That is no clear gain over {name}{settles}.{cost}")
    if row.seconds_ratio is None or row.seconds_ratio.half_width is None:
        return Verdict(who, "mixed", f"{text} Fewer epochs; too few runs were timed to tell about time.{cost}")
    if not _surely_below(row.seconds_ratio, 1.0):
        return Verdict(who, "mixed", f"{text} Fewer epochs, but no clear gain in time.{cost}")
    return Verdict(who, "gain", text)


def _surely_below(estimate: Estimate | None, bound: float) -> bool:
    return estimate is not None and estimate.mean + (estimate.half_width or 0.0) < bound


def _mean_below(estimate: Estimate | None, bound: float) -> bool:
    return estimate is not None and estimate.mean < bound


def _share(estimate: Estimate | None) -> str:
    return ABSENT if estimate is None else f"{estimate.mean:.2f}"


def _cost(row: Row, name: str) -> str:
    return f" An epoch takes {row.pace.mean:.2f} times as long as with {name}." if row.pace else ""


def _target_cells(row: Row) -> list[Cell]:
    if row.tried == 0:
        return [Cell(ABSENT), Cell(ABSENT)]
    if row.reached == 0:
        return [Cell("never", f"0 of {row.tried} seeds")] * 2
    cells = []
    for share, whole, unit in ((row.epochs_ratio, row.epochs, "epochs"), (row.seconds_ratio, row.seconds, "s")):
        if share is None or whole is None:
            cells.append(Cell(ABSENT))
            continue
        some = f", {share.count} of {row.tried} seeds" if share.count < row.tried else ""
        cells.append(Cell(interval(share), f"{number(whole.mean, 3)} {unit}{some}"))
    return cells


def _pace_cell(row: Row, rival: str) -> Cell:
    if row.seconds_per_epoch is None:
        return Cell(ABSENT)
    against = f"{interval(row.pace)} of {rival}'s" if row.pace and row.contender != rival else ""
    return Cell(number(row.seconds_per_epoch.mean, 3), against)


def _with_error(mean: float, error: float | None, digits: int = 5) -> str:
    """Two digits of the error, and no more of the mean than `digits` after the leading one."""
    if error is None or error == 0 or not math.isfinite(error):
        return number(mean, max(digits, 3))
    if abs(mean) < 1e-3:
        power = math.floor(math.log10(max(abs(mean), error)))
        return f"({mean / 10**power:.1f} ± {error / 10**power:.1f})e{power}"
    places = max(0, min(1 - math.floor(math.log10(error)), digits - math.floor(math.log10(abs(mean)))))
    rounded = f"{error:.{places}f}"
    return f"{mean:.{places}f} ± {rounded if float(rounded) else number(error, 1)}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"

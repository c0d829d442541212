"""Comparisons in, words out: figures with their uncertainty, a verdict in a sentence, the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cdgrab_experiments.compare import Comparison, Row
from cdgrab_experiments.estimates import Estimate, Gap, Outcome, judged, seeds_needed

ABSENT = "—"
OUTCOMES: dict[Outcome, str] = {"gain": "gain", "none": "no gain", "unclear": "cannot tell", "unknown": "open"}
LEGEND = (
    "Losses and metrics: mean ± standard deviation over seeds, after the last epoch. Shares of {0}'s epochs and "
    "seconds: until the loss stays at or below {0}'s final one of the same seed, over all that {0} took; mean ± half "
    "of the 95 % interval of the mean over seeds (Student's t). Difference: of the final loss from {0}'s of the same "
    "seed, likewise; with it the seeds that show a gap in 4 of 5 experiments: the paper's if it is known and can be "
    "had. Verdict: a gain if the interval is below zero, no gain if it leaves out that gap, else the seeds cannot tell."
)


@dataclass(frozen=True)
class Verdict:
    """What the figures say about a contender, in plain words."""

    contender: str
    tone: Outcome
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
    header += [f"difference from {rival}'s", "verdict"]
    header += [f"share of {rival}'s epochs", f"share of {rival}'s seconds", "seconds per epoch"]
    rows = []
    for row in comparison.rows:
        seeds = f"{len(row.seeds)} seed{'s' * (len(row.seeds) != 1)}"
        count = f"{seeds}, {len(row.diverged)} diverged" if row.diverged else seeds
        cells = [Cell(row.contender, count), Cell(spread(row.final))]
        cells += [Cell(spread(row.above))] if known else []
        cells += [Cell(spread(row.metric)), *outcome_cells(row, comparison)]
        cells += [*_target_cells(row), _pace_cell(row, rival)]
        rows.append(cells)
    return Table(header, rows)


def verdicts(comparison: Comparison) -> list[Verdict]:
    """A few sentences for every contender but the rival."""
    return [_verdict(row, comparison) for row in comparison.rows if row.contender != comparison.rival]


def _verdict(row: Row, comparison: Comparison) -> Verdict:
    outcome = _outcome(row, comparison)
    who, name = row.contender, comparison.rival
    if outcome == "unknown":
        has_rival = comparison.row(name) is not None
        missing = f"no finished run beside one of {name} yet" if has_rival else f"no run of {name} to compare it with"
        ended = f" It ended at a loss of {number(row.final.mean)}." if row.final else ""
        return Verdict(who, outcome, f"{who}: {missing}.{ended}")
    if row.difference is None:
        return Verdict(who, outcome, f"{who} diverged in all of {row.tried} seeds, where {name} did not.")
    said = [_difference(row, name), _failures(row), _chances(row, comparison, outcome), _arrival(row, comparison)]
    if outcome == "gain":
        said.append(_time(row))
    return Verdict(who, outcome, " ".join(part for part in [*said, _cost(row, name)] if part))


def _outcome(row: Row, comparison: Comparison) -> Outcome:
    compared = row.difference.count if row.difference else 0
    return judged(row.difference, comparison.gap, tried=row.tried, diverged=row.tried - compared)


def _difference(row: Row, name: str) -> str:
    found = row.difference
    assert found is not None
    seeds = "1 seed" if found.count == 1 else f"{found.count} seeds"
    if found.mean == 0:
        return f"{row.contender} ends at {name}'s loss ({seeds})."
    side = "below" if found.mean < 0 else "above"
    return f"{row.contender} ends {interval(replace(found, mean=abs(found.mean)))} {side} {name}'s loss ({seeds})."


def _failures(row: Row) -> str:
    compared = row.difference.count if row.difference else 0
    return f"It diverged in {row.tried - compared} of {row.tried} seeds." if row.tried > compared else ""


def _chances(row: Row, comparison: Comparison, outcome: Outcome) -> str:
    """Why it is no gain, or what it would take to tell."""
    found, gap = row.difference, comparison.gap
    assert found is not None
    if outcome == "gain":
        return ""
    if found.half_width is None:
        return "One seed cannot tell a gain from chance."
    if gap is None:
        return ""
    if outcome == "none":
        if found.surely_above(0.0):
            return ""
        smaller = ", but not a smaller one" if found.mean < found.half_width else ""
        return f"The interval leaves out {gap.source} ({number(gap.value, 2)}){smaller}."
    return f"That cannot tell: {_needed(found, gap)}."


def _needed(found: Estimate, gap: Gap) -> str:
    seeds = seeds_needed(found.deviation or 0.0, gap.value)
    return f"to see {gap.source} ({number(gap.value, 2)}) takes {seeds:,} seeds"


def _arrival(row: Row, comparison: Comparison) -> str:
    """When it got down to the rival's final loss."""
    name, rival = comparison.rival, comparison.row(comparison.rival)
    if row.reached == 0:
        return f"It never got down to {name}'s final loss to stay."
    after = f"after {_share(row.epochs_ratio)} of the epochs"
    if row.seconds_ratio:
        count = row.seconds_ratio.count
        timed = f" (of {count} seed{'s' * (count != 1)})" if count < row.reached else ""
        after += f" and {_share(row.seconds_ratio)} of the seconds{timed}"
    if row.reached < row.tried:
        return f"It reached {name}'s final loss in {row.reached} of {row.tried} seeds, there {after}."
    # A noisy rival settles below its own final loss before its last epoch: earlier than one is not yet earlier.
    own = rival.epochs_ratio.mean if rival and rival.epochs_ratio else 1.0
    settles = f"; {name} itself settles there after {_share(rival.epochs_ratio)}" if rival and own < 0.995 else ""
    return f"It reached {name}'s final loss {after}{settles}."


def _time(row: Row) -> str:
    if row.seconds_ratio is None or row.seconds_ratio.half_width is None:
        return "Too few runs were timed to tell about seconds."
    return "" if row.seconds_ratio.surely_below(1.0) else "That is no clear gain in seconds."


def _share(estimate: Estimate | None) -> str:
    return ABSENT if estimate is None else f"{estimate.mean:.2f}"


def _cost(row: Row, name: str) -> str:
    return f"An epoch takes {row.pace.mean:.2f} times as long as with {name}." if row.pace else ""


def outcome_cells(row: Row, comparison: Comparison) -> list[Cell]:
    """The paired difference of final losses, and what it says."""
    if row.contender == comparison.rival:
        return [Cell(ABSENT)] * 2
    found, gap = row.difference, comparison.gap
    power = ""
    if found is not None and found.deviation is not None and gap is not None:
        power = f"{number(gap.value, 2)} takes {seeds_needed(found.deviation, gap.value):,} seeds"
    return [Cell(interval(found), power), Cell(OUTCOMES[_outcome(row, comparison)])]


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

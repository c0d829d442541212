"""The paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdgrab_experiments import published
from cdgrab_experiments.compare import Comparison, finished, metric_of
from cdgrab_experiments.estimates import Estimate
from cdgrab_experiments.published import Point, Published
from cdgrab_experiments.records import EpochRecord, Run
from cdgrab_experiments.words import Cell, Table, interval, spread


@dataclass(frozen=True)
class Beside:
    """What the paper has on a setting.

    Attributes:
        table: Its figures and ours; without rows if it has none.
        setup: Its set-up in words.
        note: What to know about its figures.
        differences: Where our set-up is another.
    """

    table: Table
    setup: str
    note: str
    differences: list[str]

    @property
    def remarks(self) -> str:
        """All of it that is not in the table."""
        here = f"Here: {'; '.join(self.differences)}." if self.differences else ""
        return " ".join(part for part in (f"Paper: {self.setup}.", self.note, here) if part)


def beside_the_paper(comparison: Comparison) -> Beside | None:
    """None if the paper does not have this task."""
    found = published.find(comparison.setting)
    if found is None:
        return None
    rows = [line for point in found.curve for line in _at(point, comparison, found)]
    if found.loss:
        last = Point(comparison.setting.epochs, found.loss, found.metric)
        rows += _at(last, comparison, found, final=True)
    ours = comparison.row("cd-grab")
    share, pace = (interval(value) for value in ((ours.epochs_ratio, ours.pace) if ours else (None, None)))
    if found.epochs_ratio:
        rows.append(_line("share of epochs CD-GraB takes to D-RR's final loss", found.epochs_ratio, share))
    if found.pace:
        rows.append(_line("seconds per epoch, CD-GraB over D-RR (authors' code)", found.pace, pace))
    differences = published.differences(comparison.setting, found)
    return Beside(Table(["", "paper", "here"], rows), found.setup, found.note, differences)


def _at(point: Point, comparison: Comparison, found: Published, *, final: bool = False) -> list[list[Cell]]:
    """Losses and metrics after as many epochs as the point has."""
    lines = []
    for what, values in (("loss", point.loss), (found.metric_name, point.metric)):
        after = f"{point.epoch} epoch{'s' * (point.epoch != 1)}"
        title = f"final {what}" if final else f"{what} after {after}"
        ours: dict[str, dict[int, float]] = {}
        for name, value in values.items():
            runs = comparison.runs.get(name, {})
            ours[name] = _by_seed(point.epoch, runs, None if what == "loss" else found.metric_key)
            here = spread(Estimate.of([*ours[name].values()]))
            lines.append(_line(f"{title}, {published.NAMES[name]} ({name})", f"{value:g}", here))
        if {"cd-grab", "rr"} <= values.keys():
            pairs = [ours["cd-grab"][seed] - ours["rr"][seed] for seed in ours["cd-grab"].keys() & ours["rr"].keys()]
            paper = f"{values['cd-grab'] - values['rr']:.3g}"
            lines.append(_line(f"{title}, CD-GraB less D-RR", paper, interval(Estimate.of(pairs))))
    return lines


def _by_seed(epoch: int, runs: Mapping[int, Run], metric: str | None) -> dict[int, float]:
    """The loss of finished runs, if `metric` is None; the metric that counts, if it is empty."""

    def value(run: Run, record: EpochRecord) -> float:
        if metric is None:
            return record.loss
        return record.metrics.get(metric, metric_of(run, record))

    through = {seed: run for seed, run in runs.items() if finished(run) and len(run.epochs) > epoch}
    return {seed: value(run, run.epochs[epoch]) for seed, run in through.items()}


def _line(what: str, paper: str, here: str) -> list[Cell]:
    return [Cell(what), Cell(paper), Cell(here)]

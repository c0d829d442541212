"""Runs in, comparison out: what every contender reaches, and how soon it passes the final loss of the rival.

The rival is random reshuffling (`rr`) unless said otherwise, and every run is held against the rival of its own seed.
*Reached* means: from then on the loss stays at or below the rival's final one, with a straight line between epochs.
Ratios are the paper's: epochs until then over all epochs of the rival, seconds until then over all its seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cdgrab import ORDERS
from cdgrab_experiments import published
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.estimates import Estimate, Gap
from cdgrab_experiments.records import EpochRecord, Run, settings

RIVAL = "rr"
_SECONDS = [field.name for field in fields(EpochRecord) if field.name.startswith("seconds")]


@dataclass(frozen=True)
class Row:
    """One contender in one setting.

    Attributes:
        seeds: Of runs that went through all their epochs and ended with a loss that is a number.
        diverged: Of runs that stopped before their time, or ended with a loss that is none.
        final: Training loss after the last epoch.
        above: Its distance above the smallest possible one, where that is known.
        metric: After the last epoch.
        tried: Seeds, diverged ones included, whose rival went through: those that could have reached the target.
        reached: How many of them did; the four figures below are over these.
        epochs: Until the target was reached, with `seconds` alike.
        epochs_ratio: `epochs` over all epochs of the rival, with `seconds_ratio` alike.
        seconds_per_epoch: Over finished seeds.
        pace: Seconds per epoch over the rival's, seed by seed.
        difference: Of the final loss from the rival's, over the seeds that both finished.
    """

    contender: str
    seeds: list[int]
    diverged: list[int]
    final: Estimate | None
    above: Estimate | None
    metric: Estimate | None
    tried: int
    reached: int
    epochs: Estimate | None
    seconds: Estimate | None
    epochs_ratio: Estimate | None
    seconds_ratio: Estimate | None
    seconds_per_epoch: Estimate | None
    pace: Estimate | None
    difference: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """All contenders in one setting.

    Attributes:
        title: The setting in words, different for every setting of a call of `compare`.
        runs: By contender, then by seed; without seconds where several ran at a time.
        rows: The rival first, then `cd-grab`, then the others.
        gap: The difference in final loss that one is looking for; None without a rival.
        notes: What a reader must know about these figures: unfinished, missing or diverged runs, few seeds.
    """

    setting: RunConfig
    title: str
    rival: str
    runs: dict[str, dict[int, Run]]
    rows: list[Row]
    gap: Gap | None
    notes: list[str]

    @property
    def any_run(self) -> Run:
        """For what all runs of a setting share, such as data and metric."""
        return next(run for runs in self.runs.values() for run in runs.values())

    def row(self, contender: str) -> Row | None:
        """The row of `contender`, if it took part."""
        return next((row for row in self.rows if row.contender == contender), None)


def compare(runs: Iterable[Run], *, rival: str = RIVAL) -> list[Comparison]:
    """Compare the contenders of every setting with `rival`, seed by seed.

    Nothing is required of the runs: what cannot be compared is left out of the figures and named in the notes.
    """
    groups = sorted(settings(runs).items(), key=lambda item: _setting_key(item[0]))
    names = _titles([setting for setting, _ in groups])
    return [
        _compare_setting(setting, title, found, rival) for (setting, found), title in zip(groups, names, strict=True)
    ]


def reached(epochs: Sequence[EpochRecord], target: float) -> tuple[float, float] | None:
    """Epochs and seconds from when on the loss stays at or below `target`; None if it ends above.

    A noisy loss touches a value long before it stays there, so what counts is the last crossing, for all alike.
    """
    if not epochs:
        return None
    above = [i for i, record in enumerate(epochs) if not record.loss <= target]  # so written, NaN is above
    if not above:
        return float(epochs[0].epoch), epochs[0].seconds
    if above[-1] == len(epochs) - 1:
        return None
    before, after = epochs[above[-1]], epochs[above[-1] + 1]
    drop = before.loss - after.loss
    share = (before.loss - target) / drop if math.isfinite(drop) else 1.0
    return (
        before.epoch + share * (after.epoch - before.epoch),
        before.seconds + share * (after.seconds - before.seconds),
    )


def finished(run: Run) -> bool:
    """Whether the run went through all its epochs and ended with a loss that is a number."""
    return bool(run.epochs) and run.epochs[-1].epoch >= run.config.epochs and math.isfinite(run.epochs[-1].loss)


def diverged(run: Run) -> bool:
    """Whether the run is over without having gone through."""
    return run.complete and not finished(run)


def _compare_setting(setting: RunConfig, title: str, found: list[Run], rival: str) -> Comparison:
    notes: list[str] = []
    runs: dict[str, dict[int, Run]] = {}
    for contender in sorted({run.config.contender for run in found}, key=lambda name: _contender_key(name, rival)):
        mine = runs.setdefault(contender, {})
        for run in sorted((run for run in found if run.config.contender == contender), key=lambda run: run.config.seed):
            if run.config.seed in mine:
                notes.append(f"{contender}, seed {run.config.seed}: found more than once; the first one is used.")
            mine.setdefault(run.config.seed, _trusted(run))
    targets = {seed: run for seed, run in runs.get(rival, {}).items() if finished(run)}
    rows = [_row(contender, mine, targets) for contender, mine in runs.items()]
    gap = _gap(setting, next((row for row in rows if row.contender == rival), None))
    return Comparison(setting, title, rival, runs, rows, gap, notes + _notes(runs, rows, rival))


def _gap(setting: RunConfig, rival: Row | None) -> Gap | None:
    """The paper's, if it has one and there is as much to gain; else what would be worth having."""
    if rival is None or rival.final is None:
        return None
    paper = published.find(setting)
    wanted = 0.0 if paper is None or rival.contender != RIVAL else paper.gap
    if rival.above is not None and (not wanted or wanted > rival.above.mean):
        return Gap(rival.above.mean / 2, f"half of {rival.contender}'s distance to the minimum")
    if wanted:
        return Gap(wanted, "the paper's gap")
    return Gap(abs(rival.final.mean) / 100, f"1 % of {rival.contender}'s loss")


def _trusted(run: Run) -> Run:
    """Without its seconds if it was one of several runs at a time: these say how busy the machine was."""
    if run.info.at_a_time == 1:
        return run
    nothing: dict[str, Any] = dict.fromkeys(_SECONDS, math.nan)
    return replace(run, epochs=[replace(record, **nothing) for record in run.epochs])


def _row(contender: str, runs: dict[int, Run], targets: dict[int, Run]) -> Row:
    through = {seed: run for seed, run in runs.items() if finished(run)}
    out = [seed for seed, run in runs.items() if diverged(run)]
    last = {seed: run.epochs[-1] for seed, run in through.items()}
    pairs = [(run, targets[seed]) for seed, run in through.items() if seed in targets]
    hits = [(reached(run.epochs, other.epochs[-1].loss), other.epochs[-1]) for run, other in pairs]
    there = [(*when, end) for when, end in hits if when is not None]
    paces = [(run.epochs[-1], other.epochs[-1]) for run, other in pairs]
    return Row(
        contender=contender,
        seeds=list(through),
        diverged=out,
        final=Estimate.of([record.loss for record in last.values()]),
        above=Estimate.of(
            [last[s].loss - run.info.minimum for s, run in through.items() if run.info.minimum is not None]
        ),
        metric=Estimate.of([metric_of(run, last[seed]) for seed, run in through.items()]),
        tried=len(pairs) + sum(seed in targets for seed in out),
        reached=len(there),
        epochs=Estimate.of([epochs for epochs, _, _ in there]),
        seconds=Estimate.of([seconds for _, seconds, end in there if not math.isnan(end.seconds)]),
        epochs_ratio=Estimate.of([_over(epochs, end.epoch) for epochs, _, end in there]),
        seconds_ratio=Estimate.of([_over(seconds, end.seconds) for _, seconds, end in there]),
        seconds_per_epoch=Estimate.of([_over(record.seconds, record.epoch) for record in last.values()]),
        pace=Estimate.of([_over(_over(a.seconds, a.epoch), _over(b.seconds, b.epoch)) for a, b in paces]),
        difference=Estimate.of([a.loss - b.loss for a, b in paces]),
    )


def metric_of(run: Run, record: EpochRecord) -> float:
    """The metric that counts; NaN where it is absent, as records write NaN as nothing."""
    value: float | None = record.metrics.get(run.info.metric)
    return math.nan if value is None else value


def _over(value: float, whole: float) -> float:
    """NaN, which estimates leave out, where nothing was measured."""
    return value / whole if whole > 0 else math.nan


def _notes(runs: dict[str, dict[int, Run]], rows: list[Row], rival: str) -> list[str]:
    notes = []
    for contender, mine in runs.items():
        for seed, run in mine.items():
            done = run.epochs[-1].epoch if run.epochs else 0
            if diverged(run):
                why = run.info.stopped or "the loss is not a number"
                notes.append(f"{contender}, seed {seed}: stopped after {done} of {run.config.epochs} epochs ({why}).")
            elif not finished(run):
                progress = f"{done} of {run.config.epochs} epochs"
                notes.append(f"{contender}, seed {seed}: not finished, {progress}; left out of the table.")
    if rival not in runs:
        return [*notes, f"There is no run of {rival} here, so there is no loss to reach; figures stand alone."]
    seeds = {row.contender: row.seeds for row in rows if row.seeds}
    if rival not in seeds:
        notes.append(f"No run of {rival} has gone through, so there is no loss to reach yet.")
    if len({tuple(found) for found in seeds.values()}) > 1:
        listed = "; ".join(f"{name}: {', '.join(map(str, found))}" for name, found in seeds.items())
        notes.append(f"Finished seeds differ ({listed}). Comparisons with {rival} use those in common.")
    elif seeds and all(len(found) == 1 for found in seeds.values()):
        notes.append("One seed: what is chance and what is not cannot be told apart.")
    everyone = [run for mine in runs.values() for run in mine.values()]
    if len({run.info.data for run in everyone}) > 1:
        listed = "; ".join(sorted({run.info.data for run in everyone}))
        notes.append(f"Runs were made with different data ({listed}): they do not compare.")
    if any(run.info.at_a_time > 1 for run in everyone):
        notes.append("Several runs shared the machine: their seconds are left out.")
    machines = {str(run.info.environment.get("hardware", "")) for run in everyone}
    if len(machines) > 1:
        notes.append(f"Runs come from different hardware ({'; '.join(sorted(machines))}): do not trust their seconds.")
    return notes


def _titles(found: list[RunConfig]) -> list[str]:
    """Titles, with whatever else differs where two would be the same."""
    names = []
    for setting in found:
        alike = [other for other in found if other.title == setting.title]
        told = [
            f"{field.name.replace('_', ' ')} {getattr(setting, field.name)}"
            for field in fields(RunConfig)
            if len({getattr(other, field.name) for other in alike}) > 1
        ]
        names.append(", ".join([setting.title, *told]))
    return names


def _setting_key(setting: RunConfig) -> tuple[object, ...]:
    return (setting.task, setting.variant, setting.partition, setting.workers, setting.lr, str(setting))


def _contender_key(name: str, rival: str) -> tuple[int, str]:
    order = name.split(",")[0].split(" (")[0]
    known = ["cd-grab", *ORDERS]
    return (-1 if name == rival else known.index(order) if order in known else len(known), name)

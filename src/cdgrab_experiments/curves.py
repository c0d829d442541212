"""Runs in, lines out: the mean over seeds and the range they span, for figures and for the page."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cdgrab_experiments.compare import finished, metric_of
from cdgrab_experiments.estimates import LARGEST
from cdgrab_experiments.records import EpochRecord, Run

Array = npt.NDArray[np.float64]

# Where the time goes, in the order in which it is drawn: field of a record, and what to call it.
PARTS = {
    "seconds_compute": "forward, backward, step",
    "seconds_data": "data",
    "seconds_exchange": "exchange",
    "seconds_sorter": "sorter",
}


@dataclass(frozen=True)
class Band:
    """A quantity along the epochs: mean, smallest and largest over seeds; NaN where nothing was recorded."""

    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Curve:
    """A contender's runs in one setting, as lines. `seconds` is the mean over seeds that have any, at every epoch."""

    seeds: list[int]
    epochs: Array
    seconds: Array
    loss: Band
    above: Band | None
    metric: Band | None
    herding_bound: Band | None
    imbalance: Band | None

    def bands(self) -> dict[str, Band]:
        """The quantities there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Band)}


def curve(runs: Mapping[int, Run]) -> Curve | None:
    """The lines of one contender; None if nothing has been recorded.

    Finished runs if there are any, otherwise all as far as they all got: a mean whose seeds change along the way would
    jump where one drops out.
    """
    chosen = {seed: run for seed, run in runs.items() if finished(run)} or {s: r for s, r in runs.items() if r.epochs}
    if not chosen:
        return None
    shared = sorted(set.intersection(*({record.epoch for record in run.epochs} for run in chosen.values())))
    if not shared:
        return None
    by_epoch = [{record.epoch: record for record in run.epochs} for run in chosen.values()]
    table = [[records[epoch] for epoch in shared] for records in by_epoch]

    def band(value: Callable[[Run, EpochRecord], float | None]) -> Band | None:
        rows = [[value(run, r) for r in records] for run, records in zip(chosen.values(), table, strict=True)]
        return _band(np.array([[np.nan if v is None else v for v in row] for row in rows], dtype=np.float64))

    nothing = np.full(len(shared), np.nan)
    timed = [seconds for records in table if not np.isnan(seconds := [record.seconds for record in records]).any()]
    return Curve(
        seeds=list(chosen),
        epochs=np.array(shared, dtype=np.float64),
        seconds=np.array(timed).mean(0) if timed else nothing,
        loss=band(lambda _, record: record.loss) or Band(nothing, nothing, nothing),
        above=band(lambda run, record: None if run.info.minimum is None else record.loss - run.info.minimum),
        metric=band(metric_of),
        herding_bound=band(lambda _, record: record.herding_bound),
        imbalance=band(lambda _, record: record.imbalance),
    )


def curves(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, Curve]:
    """The lines of every contender that has any."""
    found = {contender: curve(mine) for contender, mine in runs.items()}
    return {contender: line for contender, line in found.items() if line is not None}


def time_split(runs: Mapping[int, Run]) -> dict[str, float] | None:
    """Mean seconds per epoch by part (`PARTS`, and `"other"` where these do not make up the whole)."""
    last = [run.epochs[-1] for run in runs.values() if run.epochs and run.epochs[-1].epoch > 0]
    last = [record for record in last if record.seconds > 0]
    if not last:
        return None
    split = {name: float(np.mean([getattr(r, part) / r.epoch for r in last])) for part, name in PARTS.items()}
    rest = float(np.mean([r.seconds / r.epoch for r in last])) - sum(split.values())
    return {**split, "other": rest} if rest > 0.005 * sum(r.seconds / r.epoch for r in last) / len(last) else split


def _band(values: Array) -> Band | None:
    """None if there is no number at all."""
    values = np.where(np.abs(values) < LARGEST, values, np.nan)
    if np.isnan(values).all():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an epoch without a number is a gap in the line
        low, high = np.nanmin(values, 0), np.nanmax(values, 0)
    return Band(values.mean(0), low, high)

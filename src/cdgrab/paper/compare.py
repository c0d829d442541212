"""Runs in, comparison out: what an order reaches, and how soon it passes another's final loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from cdgrab.paper.records import Runs


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} ± {self.deviation:{spec}}"


@dataclass(frozen=True)
class Row:
    """One order in one setting.

    `epochs` and `seconds` say from when on the loss stays at or below the rival's final one; None if some seed never
    got there.
    """

    name: str
    workers: int
    order: str
    final: Spread
    epochs: Spread | None
    seconds: Spread | None


def compare(runs: Runs, *, rival: str, floors: dict[str, float]) -> list[Row]:
    """Compare all orders with `rival`, seed by seed.

    Args:
        runs: Runs of several orders with the same settings and seeds.
        rival: The order whose final loss is the target.
        floors: The smallest possible loss by experiment, where it is known; losses are then measured from it.
    """
    settings = list(dict.fromkeys((config.name, config.workers) for config in runs))
    orders = list(dict.fromkeys(config.order for config in runs))
    rows = []
    for name, workers in settings:
        here = {(c.order, c.seed): records for c, records in runs.items() if (c.name, c.workers) == (name, workers)}
        for order in orders:
            final, epochs, seconds = [], [], []
            seeds = [seed for other, seed in here if other == order]
            for seed in seeds:
                records, target = here[order, seed], here[rival, seed][-1].loss
                final.append(records[-1].loss - floors.get(name, 0.0))
                above = [record.epoch for record in records if record.loss > target]
                if not above or above[-1] < records[-1].epoch:
                    # A noisy loss touches its own final value long before it stays there: count from the last epoch
                    # above the target, for both orders alike.
                    reached = records[above[-1] + 1] if above else records[0]
                    epochs.append(float(reached.epoch))
                    seconds.append(reached.seconds)
            complete = len(epochs) == len(seeds)
            rows.append(
                Row(
                    name,
                    workers,
                    order,
                    Spread.of(final),
                    Spread.of(epochs) if complete else None,
                    Spread.of(seconds) if complete else None,
                )
            )
    return rows

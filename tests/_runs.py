"""Runs made up for tests of comparison, figures and page: nothing is trained."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.records import EpochRecord, Run, RunInfo

SETTING = RunConfig(
    task="hmda",
    variant="",
    order="rr",
    rule="greedy",
    source="exact",
    workers=4,
    batch_size=16,
    epochs=50,
    seed=0,
    optimizer="sgd",
    lr=5e-3,
    momentum=0.9,
    weight_decay=0.0,
    schedule="constant",
    partition="iid",
)
INFO = RunInfo(
    metric="accuracy",
    higher_is_better=True,
    data="HMDA New York 2017: a stand-in of 160,338 / 40,085 rows, not the original",
    num_examples=160_338,
    dim=19,
    environment={
        "cdgrab": "0.1.0",
        "torch": "2.9.0",
        "python": "3.11.7",
        "hardware": "Some CPU, 2 cores",
        "threads": 1,
    },
    command="cdgrab run hmda --order rr --seed 0",
)


def made_run(losses: Sequence[float], *, pace: float = 1.0, info: RunInfo = INFO, **changes: Any) -> Run:
    """A run with these losses from epoch 0 on, `pace` seconds per epoch, and as many epochs as there are losses."""
    config = replace(SETTING, **{"epochs": len(losses) - 1, **changes})
    records = [
        EpochRecord(
            epoch=epoch,
            loss=loss,
            metrics={info.metric: 0.9 - 0.3 * loss if math.isfinite(loss) else math.nan},
            seconds=pace * epoch,
            seconds_compute=0.8 * pace * epoch,
            seconds_data=0.1 * pace * epoch,
            seconds_sorter=0.1 * pace * epoch,
            imbalance=None if epoch == 0 else 1.0,
            herding_bound=300.0 if config.order == "rr" else 3.0 + 300.0 * 0.5**epoch,
        )
        for epoch, loss in enumerate(losses)
    ]
    command = f"cdgrab run {config.task} --order {config.order} --workers {config.workers} --seed {config.seed}"
    return Run(config, replace(info, command=command), records)


def made_experiment(
    *,
    seeds: int = 5,
    epochs: int = 50,
    orders: Sequence[str] = ("rr", "cd-grab", "id-grab", "pair"),
    workers: int = 4,
    minimum: float | None = 0.335,
    info: RunInfo = INFO,
    **changes: Any,
) -> list[Run]:
    """Losses shaped like the paper's: `cd-grab` converges, `rr` levels off, the others decay to it with workers."""
    floors = {"rr": 3e-4, "cd-grab": 6e-7, "id-grab": 5e-6 * workers, "pair": 7e-6 * workers}
    runs = []
    for order in orders:
        for seed in range(seeds):
            noise = random.Random(f"{order} {seed} {workers}")
            level = floors.get(order, 1e-4)
            losses = [
                0.335 + 0.35 * math.exp(-1.1 * min(epoch, 4) - 0.35 * epoch) + level * noise.uniform(0.7, 1.4)
                for epoch in range(epochs + 1)
            ]
            pace = noise.uniform(0.97, 1.05) * (1.0 if order == "rr" else 1.15)
            task = replace(info, minimum=minimum)
            runs.append(made_run(losses, pace=pace, info=task, order=order, seed=seed, workers=workers, **changes))
    return runs

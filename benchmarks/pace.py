"""How long an epoch of an experiment takes with `cd-grab`, against one with `rr`, on a machine that others use too.

    python -m benchmarks.pace TASK --data DIR [--variant V] [--workers W --batch B] [--rounds N] [--device cuda]

Epochs of both orders alternate in one process, on one core or a GPU; evaluation and compiling are not timed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import report
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.tasks import find_task
from cdgrab_experiments.tasks.base import Problem
from cdgrab_experiments.train import Trainer

ORDERS = ("rr", "cd-grab")


def measure(task: str, problem: Problem, choices: Choices, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of an epoch in every round, by order."""
    trainers = {
        order: Trainer(
            resolve(task, replace(choices, order=order, epochs=rounds + 1)),
            replace(problem, model=copy.deepcopy(problem.model)),
            device=device,
        )
        for order in ORDERS
    }
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    for turn in range(rounds + 1):
        for order in ORDERS if turn % 2 else reversed(ORDERS):
            before = trainers[order]._record.seconds
            trainers[order].epoch()
            if turn:  # the first round warms up
                seconds[order].append(trainers[order]._record.seconds - before)
    return seconds


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--variant")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = find_task(options.task)
    chosen = {"variant": options.variant, "workers": options.workers, "batch_size": options.batch}
    choices = Choices(**{name: value for name, value in chosen.items() if value is not None})
    problem = task.load(options.data, options.variant or task.variants[0], 0)
    seconds = measure(options.task, problem, choices, options.rounds, options.device)
    ratios = sorted(mine / theirs for mine, theirs in zip(seconds["cd-grab"], seconds["rr"], strict=True))
    quarter = len(ratios) // 4
    row = [
        *(f"{statistics.median(seconds[order]):.3f}" for order in ORDERS),
        f"{statistics.median(ratios):.2f}x",
        f"{ratios[quarter]:.2f}x to {ratios[-1 - quarter]:.2f}x",
    ]
    header = ["`rr`, s", "`cd-grab`, s", "median of ratios", "middle half of them"]
    body = f"Seconds of an epoch, medians of {options.rounds}, which alternate.\n\n" + report.table(header, [row])
    some = [str(value) for value in (options.variant, options.workers) if value is not None]
    report.write("_".join(["pace", options.task, *some]), f"Pace of {task.title}", body, data=problem.data)


if __name__ == "__main__":
    main()

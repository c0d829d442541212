"""a9a (census income), logistic regression: a convex task not in the paper, with sparse binary features."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import logistic_regression

NUM_FEATURES = 123
# Some features occur with one label only; without a penalty their weights would grow for ever, and there were no
# minimum.
L2 = 1e-4


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Dim 124."""
    found = data.find("a9a", folder)
    train, test = _read(found, "a9a"), _read(found, "a9a.t")
    line = f"a9a: {len(train[0]):,} / {len(test[0]):,} rows, {NUM_FEATURES} binary features, L2 {L2:g}"
    return logistic_regression(train, test, l2=L2, seed=seed, data=line)


def _read(found: data.Found, name: str) -> tuple[Tensor, Tensor]:
    """LIBSVM text: a label -1 or +1, then `feature:value` counted from 1."""
    lines = found.text(name).splitlines()
    x, y = torch.zeros(len(lines), NUM_FEATURES), torch.zeros(len(lines))
    places, values = [], []
    for row, line in enumerate(lines):
        try:
            label, *cells = line.split()
            y[row] = {-1.0: 0.0, 1.0: 1.0}[float(label)]
            for cell in cells:
                feature, value = cell.split(":")
                if not 1 <= int(feature) <= NUM_FEATURES:
                    raise ValueError(f"feature {feature} of {NUM_FEATURES}")
                places.append(row * NUM_FEATURES + int(feature) - 1)
                values.append(float(value))
        except (ValueError, KeyError) as error:
            raise found.damaged(name, f"is no LIBSVM text in line {row + 1} ({error})") from error
    if not lines:
        raise found.damaged(name, "is empty")
    x.view(-1)[torch.tensor(places, dtype=torch.int64)] = torch.tensor(values)
    return x, y


TASK = Task(
    name="a9a",
    title="a9a, logistic regression",
    # An example has 14 ones, so the curvature is at most 14 / 4; a step of 0.01 with momentum 0.9 acts like one of 0.1.
    settings=Settings(workers=4, batch_size=16, epochs=30, lr=0.01, momentum=0.9),
    load=load,
    needs=("a9a",),
)

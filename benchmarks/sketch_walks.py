"""Sketches against exact inner products without training: correlation along a walk, and the herding bound.

    python -m benchmarks.sketch_walks --data DIR

The gradients of a model that has been trained for some epochs are kept as they are and balanced for five rounds, as in
parallel herding. Beside them, random vectors: with a flat spectrum, and with one that falls as 1 / i.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.sketch_tasks import TASKS, Task
from cdgrab import Ordering, balance_vectors, herding_bound
from cdgrab.per_example.plan import make_plan
from cdgrab.per_example.sketch import Sketch
from cdgrab.sources import PerExampleSource
from cdgrab_experiments.captured import HeldRows

LENGTHS = (64, 128, 256, 512, 1024)
GAUSSIAN = 512  # numbers of a dense Gaussian projection, the rival
ROUNDS = 5
SEEDS = 3  # of the projections
MOST = 4096  # examples
TRAINED = 5  # epochs


def gradients(task: Task, data: Path) -> tuple[Tensor, dict[str, torch.Size], set[str]]:
    """Rows of some examples after some epochs, shapes of the parameters, and names of those that are matrices."""
    x, y = task.load(data)
    whole = min(len(x), MOST) // task.batch * task.batch
    x, y = x[:whole], y[:whole]
    model = task.make(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    for _ in range(TRAINED):
        for index in torch.randperm(len(x)).split(task.batch):
            optimizer.zero_grad()
            task.loss(model, x[index], y[index]).backward()
            optimizer.step()
    rows: list[Tensor] = []
    ordering = Ordering(len(x), batch_size=task.batch, unit_size=1, order="rr", lanes=task.batch)
    held = HeldRows(PerExampleSource())
    ordering.attach(model, source=held)
    for a, b in zip(x.split(task.batch), y.split(task.batch), strict=True):
        task.loss(model, a, b).backward()
        assert held.rows_ND is not None
        rows.append(held.rows_ND)
    return torch.cat(rows), {n: p.shape for n, p in model.named_parameters()}, make_plan(model).matrices


def vectors(steep: bool) -> tuple[Tensor, dict[str, torch.Size], set[str]]:
    """Random vectors of 4,096 numbers, which are a matrix of 64 x 64."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MOST, MOST, generator=generator)
    if steep:  # in directions of their own, not along coordinates
        directions = torch.linalg.qr(torch.randn(MOST, MOST, generator=generator))[0]
        rows = (rows / torch.arange(1, MOST + 1)) @ directions
    return rows, {"matrix": torch.Size((64, 64))}, {"matrix"}


def sketched(rows: Tensor, shapes: dict[str, torch.Size], matrices: set[str], length: int, seed: int) -> Tensor:
    """Sketches of whole rows."""
    sketch = Sketch(shapes, matrices, length, seed)
    parts = []
    for some in rows.split(64):
        for name, part in zip(shapes, some.split([shape.numel() for shape in shapes.values()], 1), strict=True):
            sketch.add_rows(name, part)
        parts.append(sketch.finish()[:, : length - sketch.watched])
    return torch.cat(parts)


def gaussian(rows: Tensor, length: int, seed: int) -> Tensor:
    """The rival: a dense projection."""
    generator = torch.Generator().manual_seed(seed)
    parts = (part @ torch.randn(part.shape[1], length, generator=generator) for part in rows.split(4096, 1))
    return torch.stack(list(parts)).sum(0)


def correlation(rows: Tensor, short: Tensor) -> float:
    """Of `<d, r>` with that of sketches, along the walk that exact signs take, all examples in one lane."""
    differences, short_differences = rows[0::2] - rows[1::2], short[0::2] - short[1::2]
    r, short_r = torch.zeros_like(rows[0]), torch.zeros_like(short[0])
    exact, found = [], []
    for d, short_d in zip(differences, short_differences, strict=True):
        s = float(d @ r)
        exact.append(s)
        found.append(float(short_d @ short_r))
        sign = 1 if s <= 0 else -1
        r += sign * d
        short_r += sign * short_d
    return statistics.correlation(exact, found)


def bound(rows: Tensor, deciding: Tensor, lanes: int) -> float:
    """Longest sum of prefixes over all lanes, in the Euclidean norm, after some rounds that these vectors decide."""
    orders = balance_vectors(deciding.view(lanes, len(rows) // lanes, -1), rounds=ROUNDS)
    return herding_bound(rows.view(lanes, len(rows) // lanes, -1), orders, ord=2)


def measure(name: str, rows: Tensor, shapes: dict[str, torch.Size], matrices: set[str], lanes: int) -> list[list[str]]:
    """Two lines of the table: correlations, and bounds over the exact one."""
    contenders: list[Callable[[int], Tensor]] = [partial(gaussian, rows, GAUSSIAN)]
    contenders += [partial(sketched, rows, shapes, matrices, length) for length in LENGTHS]
    exact = bound(rows, rows, lanes)
    random = herding_bound(rows.view(lanes, len(rows) // lanes, -1), ord=2)
    correlations = [name, "correlation", "", ""]
    bounds = [name, "bound / exact", f"{exact:.3g}", f"{random / exact:.1f}"]
    for make in contenders:
        found = [make(seed) for seed in range(SEEDS)]
        correlations.append(f"{statistics.fmean(correlation(rows, short) for short in found):.3f}")
        bounds.append(f"{statistics.fmean(bound(rows, short, lanes) for short in found) / exact:.2f}")
    print(" ".join(correlations), "|", " ".join(bounds), flush=True)
    return [correlations, bounds]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--tasks", nargs="+", default=[name for name in TASKS if name != "llama"], choices=list(TASKS))
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = []
    for name in options.tasks:
        lines += measure(name, *gradients(TASKS[name], options.data), TASKS[name].batch)
    for steep in (False, True):
        lines += measure("random, steep" if steep else "random, flat", *vectors(steep), 64)
    header = ["vectors", "figure", "exact bound", "random order", f"Gaussian {GAUSSIAN}", *map(str, LENGTHS)]
    body = (
        f"Gradients of up to {MOST:,} examples after {TRAINED} epochs, or random vectors; means over {SEEDS} "
        "projections. Correlation of `<d, r>` with that of sketches along the exact walk. Herding bound after "
        f"{ROUNDS} rounds in the lanes of the task, over that of exact signs. Columns are numbers of a sketch, of "
        "which one in eight is a witness and decides nothing.\n\n" + report.table(header, lines)
    )
    report.write("sketch_walks", "Inner products and herding bounds of sketches", body, "Public data sets")


if __name__ == "__main__":
    main()

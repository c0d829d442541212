"""What a fixed step leaves, and what no order can undercut: the investigation behind the slopes of `speedup`.

A run started at the optimum moves away from it only because of its order. How far, as a power of the step size and of
the number of workers, is what the theorems bound (2 and -2 for balanced orders, 2 and -1 for random ones) and what
decides which slopes are seen once the step is tuned.

Shapes: `G` step sizes, `S` seeds, `M` looks.
"""

from __future__ import annotations

import numpy as np

from cdgrab_experiments.theory.descent import descend
from cdgrab_experiments.theory.fits import Array, slope
from cdgrab_experiments.theory.problems.quadratic import LeastSquares
from cdgrab_experiments.theory.problems.waves import Waves
from cdgrab_experiments.theory.rates import epoch_means
from cdgrab_experiments.theory.report import Table
from cdgrab_experiments.theory.settings import Speedup
from cdgrab_experiments.theory.watch import Watch


def floor_table(s: Speedup, watch: Watch) -> Table:
    """The powers with which the error at a fixed step depends on the step and on the workers, on least squares."""
    watch.begin("fixed steps", len(s.orders) * len(s.floor_workers) * s.floor_looks[-1])
    rows = []
    for order in s.orders:
        floors_WG = np.stack([_floors(s, order, workers, watch) for workers in s.floor_workers])
        workers_W, steps_G = np.array(s.floor_workers, dtype=float), np.array(s.floor_steps)
        in_step = [float(power) for power in slope(steps_G, floors_WG)]
        in_workers = float(slope(workers_W, floors_WG.mean(1)))
        theory = ("2", "-2") if order == "cd-grab" else ("2", "-1")
        powers = [f"{power:.2f}" for power in in_step]
        rows.append([order, *powers, theory[0], f"{in_workers:.2f}", theory[1]])
    columns = ["order", *(f"power of the step, W = {workers}" for workers in s.floor_workers), "theory"]
    return Table("What a fixed step leaves, least squares", [*columns, "power of W", "theory"], rows)


def without_noise(s: Speedup) -> float:
    """The mean squared gradient norm of the non-convex problem when all units are alike: the limit of many workers."""
    flat, wave, reach, _, _ = s.high
    problem = Waves(s.seeds, s.units, s.dim, "gradient", flat, wave, reach, noise=0.0, spread=0.0)
    errors_GSM = descend(problem, "shuffle-once", workers=1, steps=s.high_steps, looks=range(s.epochs + 1))
    return float(epoch_means(errors_GSM, (s.epochs,)).mean(1).min())


def _floors(s: Speedup, order: str, workers: int, watch: Watch) -> Array:
    """Mean error over seeds and looks, for every step size."""
    problem = LeastSquares(s.floor_seeds, workers * s.units, s.dim, s.curvature, distance=0.0)
    errors_GSM = descend(
        problem,
        order,
        workers=workers,
        steps=s.floor_steps,
        looks=s.floor_looks,
        tell=lambda: watch.step(f"{workers} workers, {order}"),
    )
    means_G: Array = errors_GSM.mean((1, 2))
    return means_G

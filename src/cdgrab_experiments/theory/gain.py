"""The gain of `cd-grab` over `rr` on handwritten digits, for any optimiser and any step size.

Two models: softmax regression, whose minimum is known, and a network with one hidden layer. A gain is the loss of `rr`
over that of `cd-grab` after the same epochs with the same step size; for the convex model losses are measured from the
minimum, for the network from zero, which makes its gains look smaller.

Shapes: `G` step sizes, `S` seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cdgrab_experiments.theory.descent import descend, epochs_told
from cdgrab_experiments.theory.fits import Array, Slope, diverged_to_infinity, ratio_interval
from cdgrab_experiments.theory.optimisers import OptimiserMaker
from cdgrab_experiments.theory.problems.network import Network
from cdgrab_experiments.theory.seeds import generator
from cdgrab_experiments.theory.settings import Gain
from cdgrab_experiments.theory.watch import Watch

SOFTMAX, NETWORK = "softmax regression", "small network"
TASKS = (SOFTMAX, NETWORK)
ORDERS = ("cd-grab", "rr")


@dataclass(frozen=True)
class Point:
    """Both orders with one optimiser and step size.

    Attributes:
        single: The size of a single step.
        gain: Loss of `rr` over loss of `cd-grab`, after the last epoch.
        epochs: From which epoch on the loss of `cd-grab` stays at or below the final one of `rr`; None: never.
        worth: The smallest gain, or loss, worth a word.
    """

    task: str
    optimiser: str
    single: float
    gain: Slope
    ours: float
    rr: float
    epochs: int | None
    worth: float

    @property
    def word(self) -> str:
        """What ordering does here, as far as the seeds can tell."""
        if not 0 < self.gain.low <= self.gain.high < float("inf"):
            return "diverged"
        return (
            "helps" if self.gain.low > self.worth else "hurts" if self.gain.high < 1 / self.worth else "no difference"
        )


@functools.cache
def task(g: Gain, name: str) -> Network:
    """Digits, dealt anew for every seed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    dealt = [torch.from_numpy(generator(seed, "digits").permutation(g.examples)) for seed in range(g.seeds)]
    x_SNF = torch.stack([torch.tensor(images / 16, dtype=torch.float32)[index] for index in dealt])
    y_SN = torch.stack([torch.tensor(labels, dtype=torch.int64)[index] for index in dealt])
    network = Network(x_SNF, y_SN, outputs=10, hidden=g.hidden if name == NETWORK else 0, l2=g.l2)
    if name == SOFTMAX:
        exact = Network(x_SNF[:1].double(), y_SN[:1], outputs=10, hidden=0, l2=g.l2)
        network.floors_S = float(exact.loss(exact.minimum()[None]))  # all seeds have the same examples
    return network


def calls(g: Gain, steps: Sequence[float]) -> int:
    """How many steps of progress `compare` makes on both tasks."""
    return sum(len(ORDERS) * epochs_told(steps, task(g, name).dim, g.seeds, g.examples, g.epochs) for name in TASKS)


def compare(
    g: Gain, name: str, optimiser: str, steps: Sequence[float], make_optimiser: OptimiserMaker, watch: Watch
) -> list[Point]:
    """Both orders at every step size."""
    errors: dict[str, Array] = {}
    for order in ORDERS:

        def tell(order: str = order) -> None:
            watch.step(f"{name}, {optimiser}, {order}")

        found_GSM = descend(
            task(g, name),
            order,
            workers=g.workers,
            steps=steps,
            looks=range(g.epochs + 1),
            make_optimiser=make_optimiser,
            tell=tell,
        )
        errors[order] = diverged_to_infinity(found_GSM)
    found = []
    for i, step in enumerate(steps):
        ours_SM, rr_S = errors["cd-grab"][i], errors["rr"][i, :, -1]
        gain = ratio_interval(rr_S, ours_SM[:, -1], resamples=g.resamples)
        ours, rr = float(ours_SM[:, -1].mean()), float(rr_S.mean())
        single = step / (g.examples // g.workers)
        found.append(Point(name, optimiser, single, gain, ours, rr, epochs_until(ours_SM.mean(0), rr), g.worth))
    return found


def epochs_until(losses_M: Array, target: float) -> int | None:
    """The first epoch from which on the loss stays at or below a target.

    Example:
        >>> import numpy as np
        >>> epochs_until(np.array([9.0, 3.0, 5.0, 2.0, 1.0]), 4.0)
        3
    """
    above = [epoch for epoch, loss in enumerate(losses_M) if not loss <= target]
    until = above[-1] + 1 if above else 0
    return until if until < len(losses_M) else None


def best(points: Sequence[Point], order: str) -> Point:
    """The step size that serves an order best."""
    return min(points, key=lambda point: point.ours if order == "cd-grab" else point.rr)

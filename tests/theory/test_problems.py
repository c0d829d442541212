"""The problems are what they say: their gradients, their optima, their splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from _asserts import assert_permutation
from _inputs import randn
from cdgrab_experiments.theory.problems.network import Network
from cdgrab_experiments.theory.problems.quadratic import LeastSquares
from cdgrab_experiments.theory.problems.splits import clusters, split
from cdgrab_experiments.theory.problems.waves import Waves


def test_least_squares_has_the_hessian_and_the_optimum_it_claims() -> None:
    problem = LeastSquares(seeds=2, num_units=40, dim=4, curvature=(0.5, 2.0))
    index = torch.arange(80).view(2, 40)
    theta = randn(2, 4, dtype=torch.float64)
    mean = problem.rows(theta, problem.take(index)).mean(1)
    torch.testing.assert_close(mean, theta * torch.tensor([0.5, 2 ** (-1 / 3), 2 ** (1 / 3), 2.0]).double())
    a, b = problem.take(index)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ((a @ x[..., None])[..., 0] - b).square().mean(1) / 2

    torch.testing.assert_close(problem.error(theta[None])[0], loss(theta) - loss(torch.zeros_like(theta)))
    at_optimum = problem.rows(torch.zeros_like(theta), problem.take(index))
    assert at_optimum.norm(dim=-1).mean() > 0.5  # single units do pull, or there would be nothing to balance


def test_waves_average_to_the_landscape() -> None:
    problem = Waves(2, 30, 3, "value", flat=1.0, wave=3.0, reach=4.0, noise=3.0, spread=0.5)
    theta = randn(2, 3, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(problem.error(theta[None]).sum(), theta)
    rows = problem.rows(theta.detach(), problem.take(torch.arange(60).view(2, 30)))
    torch.testing.assert_close(rows.mean(1), slope)
    assert rows.std(1).min() > 0.5
    problem.goal = "gradient"
    torch.testing.assert_close(problem.error(theta.detach()[None])[0], slope.square().sum(1))


def test_gentle_waves_obey_pl_and_are_not_convex_while_high_ones_do_not() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    for flat, wave, obeys in ((1.0, 3.0, True), (0.125, 2.0, False)):
        problem = Waves(1, 2, 1, "value", flat, wave, reach=1.0, noise=1.0, spread=0.5)
        height = problem.error(x[:, None])[:, 0]
        problem.goal = "gradient"
        gradient2 = problem.error(x[:, None])[:, 0]
        away = x[:, 0].abs() > 0.01
        constant = (gradient2 / (2 * height))[away].min()
        assert (constant > 1 / 64) == obeys
        assert height.diff().diff().min() < 0


@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("outputs", [1, 4])
def test_network_rows_equal_automatic_differentiation(hidden: int, outputs: int) -> None:
    x = randn(2, 6, 3, dtype=torch.float64)
    y = torch.arange(12).view(2, 6) % 4 if outputs > 1 else randn(2, 6, seed=1, dtype=torch.float64)
    network = Network(x, y, outputs, hidden, l2=0.1)
    theta = randn(2, network.dim, dtype=torch.float64)
    rows = network.rows(theta, network.take(torch.arange(12).view(2, 6)))
    for seed in range(2):
        for unit in range(6):
            alone = Network(x[seed, unit][None, None], y[seed, unit][None, None], outputs, hidden, l2=0.1)
            at = theta[seed].clone().requires_grad_()
            (expected,) = torch.autograd.grad(alone.loss(at[None, None]).sum(), at)
            torch.testing.assert_close(rows[seed, unit], expected)
    torch.testing.assert_close(network.gradient(theta[None])[0], rows.mean(1))


def test_the_minimum_is_where_the_gradient_vanishes() -> None:
    x, y = clusters(seeds=2, num_units=60, classes=3, features=4)
    network = Network(x, y, outputs=3, hidden=0, l2=0.01)
    lowest = network.minimum()
    assert network.gradient(lowest[None]).abs().max() < 1e-12
    nearby = lowest + 0.01 * randn(*lowest.shape, dtype=torch.float64)
    assert (network.loss(nearby[None]) > network.loss(lowest[None])).all()


@pytest.mark.parametrize("concentration", [float("inf"), 1.0, 0.01, 0.0])
def test_a_split_deals_every_unit_once(concentration: float) -> None:
    labels = np.arange(120) % 4
    assert_permutation(split(labels, 6, concentration, seed=0), range(120))


def test_smaller_concentrations_are_more_uneven() -> None:
    labels = np.arange(400) % 4

    def unevenness(concentration: float) -> float:
        dealt = labels[split(labels, 4, concentration, seed=1)].reshape(4, 100)
        shares = np.stack([(dealt == label).mean(1) for label in range(4)])
        return float(abs(shares - 0.25).mean())

    found = [unevenness(concentration) for concentration in (float("inf"), 1.0, 0.1, 0.0)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(0.375)  # every worker has one label only

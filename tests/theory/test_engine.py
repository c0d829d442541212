"""What the experiments compute with: rounds, descents and optimisers, against slower and more obvious versions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import cdgrab
from _inputs import ROWS, randn
from cdgrab.balancing import reference
from cdgrab_experiments.theory.descent import Problem, descend
from cdgrab_experiments.theory.optimisers import Adam, Optimiser, Sgd
from cdgrab_experiments.theory.problems.network import Network
from cdgrab_experiments.theory.problems.quadratic import LeastSquares
from cdgrab_experiments.theory.problems.waves import Waves
from cdgrab_experiments.theory.rounds import balance_rounds


@pytest.mark.parametrize("order", ["cd-grab", "pair", "grab", "id-grab", "rr"])
@pytest.mark.parametrize("rule", ["greedy", "walk", "halving"])
def test_rounds_are_those_of_balance_vectors(order: str, rule: str) -> None:
    vectors = randn(3, 21, 5, seed=7)
    *_, last = balance_rounds(vectors, order, rule, 4, seed=3)
    expected = cdgrab.balance_vectors(vectors, order=order, rule=rule, rounds=4, seed=3)
    np.testing.assert_array_equal(last.orders_WU, expected.numpy())
    assert last.bound == pytest.approx(cdgrab.herding_bound(vectors.double(), expected), rel=1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_a_round_is_the_papers_loop(name: str) -> None:
    """With integers nothing is rounded, so not one sign may differ."""
    vectors = (ROWS[name](4 * 16, 6, seed=11).clamp(-30, 30) * 8).round().view(4, 16, 6).double()
    first, second = list(balance_rounds(vectors, "cd-grab", "greedy", 1, seed=0))
    assert first.bound == pytest.approx(cdgrab.herding_bound(vectors))
    np.testing.assert_array_equal(second.orders_WU, reference.pair_balance(vectors)[0].numpy())


def test_a_shift_changes_what_is_balanced_and_not_the_bound() -> None:
    vectors = randn(2, 40, 4)
    plain = [done.bound for done in balance_rounds(vectors, "id-grab", "greedy", 3, 0)]
    moved = [done.bound for done in balance_rounds(vectors, "id-grab", "greedy", 3, 0, lambda epoch: torch.ones(4) * 9)]
    assert plain[0] == moved[0]
    assert plain[1:] != moved[1:]


def teacher() -> Network:
    x, y = randn(2, 24, 3, dtype=torch.float64), torch.arange(48).view(2, 24) % 4
    return Network(x, y, outputs=4, hidden=5, l2=0.1)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "least squares": lambda: LeastSquares(2, 24, 3, (0.5, 2.0)),
    "waves": lambda: Waves(2, 24, 3, "value", 1.0, 3.0, 4.0, 3.0, 0.5),
    "network": teacher,
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("order", ["cd-grab", "grab"])
def test_a_descent_is_the_plain_loop(name: str, order: str) -> None:
    """Runs computed together, against one run at a time with the paper's loop for its order."""
    problem, workers, steps, epochs = PROBLEMS[name](), 3, (0.05, 0.4), 4
    found = descend(problem, order, workers=workers, steps=steps, looks=[0, 2, epochs])
    assert found.shape == (2, 2, 3)
    units = problem.num_units // workers
    for g, step in enumerate(steps):
        for seed in range(2):
            theta, errors = problem.start()[seed].clone(), []
            order_WU = torch.arange(units).repeat(workers, 1)
            mean_WD = torch.zeros(workers, len(theta), dtype=torch.float64)
            for epoch in range(epochs + 1):
                if epoch in (0, 2, epochs):
                    both = torch.stack([theta, theta])[None]
                    errors.append(float(problem.error(both)[0, seed]))
                seen = torch.empty(workers, units, len(theta), dtype=torch.float64)
                for turn in range(units):
                    for w in range(workers):
                        unit = seed * problem.num_units + w * units + int(order_WU[w, turn])
                        seen[w, turn] = problem.rows(theta[None], problem.take(torch.tensor([[unit]])))[0, 0]
                    theta = theta - step / units * seen[:, turn].mean(0)
                if order == "cd-grab":
                    turns, _ = reference.pair_balance(seen)
                else:
                    turns, _ = reference.mean_balance(seen, mean_WD)
                order_WU, mean_WD = order_WU.gather(1, turns), seen.mean(1)
            np.testing.assert_allclose(found[g, seed], errors, rtol=1e-9)


def test_free_orders_are_the_librarys() -> None:
    """After one epoch `rr` and `cd-grab` agree: both begin with the order dealt. After two they do not."""
    problem = LeastSquares(2, 24, 3, (0.5, 2.0))
    runs = {order: descend(problem, order, workers=3, steps=[0.5], looks=[1, 2]) for order in ("rr", "cd-grab")}
    np.testing.assert_array_equal(runs["rr"][..., 0], runs["cd-grab"][..., 0])
    assert (runs["rr"][..., 1] != runs["cd-grab"][..., 1]).all()
    again = descend(problem, "shuffle-once", workers=3, steps=[0.5], looks=[1, 2])
    np.testing.assert_array_equal(again[..., 0], runs["rr"][..., 0])
    replaced = descend(problem, "with-replacement", workers=3, steps=[0.5], looks=[1])
    assert (replaced[..., 0] != again[..., 0]).all()


def test_splitting_the_runs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = LeastSquares(2, 24, 3, (0.5, 2.0))
    whole = descend(problem, "cd-grab", workers=3, steps=[0.1, 0.2, 0.4], looks=[3])
    monkeypatch.setattr("cdgrab_experiments.theory.descent._NUMBERS", 1)
    np.testing.assert_array_equal(descend(problem, "cd-grab", workers=3, steps=[0.1, 0.2, 0.4], looks=[3]), whole)


def test_a_run_that_diverges_does_so_without_noise() -> None:
    problem = LeastSquares(2, 24, 3, (0.5, 2.0))
    found = descend(problem, "cd-grab", workers=3, steps=[1e5, 0.1], looks=[60])
    assert not (found[0] < 1e100).any()
    assert (found[1] < 1).all()


@pytest.mark.parametrize(
    ("make", "torch_optimiser"),
    [
        (Sgd, lambda p: torch.optim.SGD(p, lr=0.1)),
        (lambda steps: Sgd(steps, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Adam, lambda p: torch.optim.Adam(p, lr=0.1)),
        (lambda steps: Adam(steps, weight_decay=0.2), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2)),
    ],
    ids=["SGD", "momentum", "Adam", "AdamW"],
)
def test_optimisers_are_those_of_torch(
    make: Callable[[Tensor], Optimiser], torch_optimiser: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    ours, theirs = randn(2, 5, dtype=torch.float64), randn(2, 5, dtype=torch.float64).requires_grad_()
    optimiser, judge = make(torch.full((2,), 0.1, dtype=torch.float64)), torch_optimiser([theirs])
    for step in range(5):
        grad = randn(2, 5, seed=step + 1, dtype=torch.float64)
        optimiser.step(ours, grad)
        theirs.grad = grad.clone()
        judge.step()
    torch.testing.assert_close(ours, theirs.detach())

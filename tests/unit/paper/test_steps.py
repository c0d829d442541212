"""What a captured step computes, here without a graph: the gradient of the batch, and the rows of its units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from _problems import PROBLEMS
from cdgrab import Ordering, World
from cdgrab.paper.captured import CapturedSteps
from cdgrab.paper.steps import Collector, LateCollector
from cdgrab.paper.tasks.base import Problem


def captured(problem: Problem, *, balanced: bool, source: str = "exact") -> CapturedSteps:
    ordering = Ordering(len(problem.train[0]), batch_size=6, unit_size=1, world=World.simulated(3))
    if source == "sketch":
        ordering.attach(problem.model, source="sketch", length=10**6)  # so long that nothing is given up
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    return CapturedSteps(problem, ordering, optimizer, batch=6, balanced=balanced)


def gradient(problem: Problem, batch: tuple[Tensor, ...]) -> Tensor:
    grads = torch.autograd.grad(problem.loss(problem.model, *batch), list(problem.model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("num", [6, 4])  # the last batch may be short
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_and_rows(name: str, balanced: bool, num: int) -> None:
    problem = PROBLEMS[name](31)
    steps = captured(problem, balanced=balanced)
    batch = tuple(part[:num] for part in problem.train)
    for _ in range(2):  # nothing is left from one step to the next
        rows = steps._gradient(batch)
        torch.testing.assert_close(steps._flat_D, gradient(problem, batch))
    assert (rows is not None) == balanced
    if rows is not None:
        expected = torch.stack([gradient(problem, tuple(part[i : i + 1] for part in batch)) for i in range(num)])
        # Of any scale, as long as it is the same in short batches.
        torch.testing.assert_close(rows, expected / 6 if problem.gradient is None else expected)


def test_sketches_come_from_the_attachment() -> None:
    problem = PROBLEMS["layers"](31)
    rows = captured(problem, balanced=True, source="sketch")._gradient(tuple(part[:6] for part in problem.train))
    other = PROBLEMS["layers"](31)
    expected = captured(other, balanced=True)._gradient(tuple(part[:6] for part in other.train))
    assert rows is not None
    assert expected is not None
    torch.testing.assert_close(rows, expected)


class Listener:
    """An ordering that remembers."""

    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def observe(self, rows: Tensor) -> None:
        self.heard += rows.clone().unbind()


SIZES = [4] * 150 + [3] + [4] * 3  # more than are collected, then a short batch, then the next epoch


def test_rows_are_handed_over_in_their_order_and_all_of_them() -> None:
    listener, like = Listener(), torch.zeros(5)
    collector = Collector(listener, 4, like)  # type: ignore[arg-type]
    for number, size in enumerate(SIZES):
        collector.place(size).fill_(number)
    collector.flush()
    collector.flush()
    assert [rows.shape for rows in listener.heard] == [(size, 5) for size in SIZES]
    assert [int(rows[0, 0]) for rows in listener.heard] == list(range(len(SIZES)))


@pytest.mark.parametrize("sizes", [[4] * 64, [4] * 5 + [3], [4], [2]])
def test_late_rows_are_handed_over_in_their_order_and_all_of_them(sizes: list[int]) -> None:
    listener = Listener()
    collector = LateCollector(listener, lambda kept, x: x * kept[0][:, None, None], 4)  # type: ignore[arg-type]
    for start in (0.0, 100.0):  # nothing is left from one block of steps to the next
        x = torch.arange(sum(sizes) * 5.0).view(-1, 5)
        for number in range(len(sizes)):
            collector.keep((torch.tensor(start + number),))
        collector.flush((x,))
        expected = [(start + number) * part for number, part in enumerate(x.split(sizes))]
        assert all(torch.equal(*both) for both in zip(listener.heard, expected, strict=True))
        listener.heard.clear()

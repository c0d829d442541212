"""What a captured step computes, here without a graph: the gradient of the batch, and the rows of its units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from _problems import PROBLEMS
from _streams import Line, lines_for_streams
from cdgrab import Ordering
from cdgrab.sources import PerExampleSource, SketchSource
from cdgrab_experiments.captured import CapturedSteps, HeldRows, Recorded
from cdgrab_experiments.steps import Collector, LateCollector
from cdgrab_experiments.tasks.base import Problem


def captured(problem: Problem, *, balanced: bool, source: str = "per_example", workers: int = 3) -> CapturedSteps:
    ordering = Ordering(len(problem.train[0]), batch_size=6, unit_size=1, lanes=workers)
    held = None
    if balanced and problem.gradient is None and problem.examples == 1:
        # So long that nothing is given up.
        held = HeldRows(SketchSource(length=2**16) if source == "sketch" else PerExampleSource())
        ordering.attach(problem.model, source=held)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    return CapturedSteps(problem, ordering, optimizer, batch=6, balanced=balanced, held=held)


def gradient(problem: Problem, batch: tuple[Tensor, ...]) -> Tensor:
    grads = torch.autograd.grad(problem.loss(problem.model, *batch), list(problem.model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("num", [6, 3])  # the last batch may be short
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_and_rows(name: str, balanced: bool, num: int) -> None:
    problem = PROBLEMS[name](31 if num == 6 else num)
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
    torch.testing.assert_close(rows @ rows.T, expected @ expected.T)


class Replayed:
    """Stands in for a recorded step: takes it when it is replayed, and notes when."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.rows = torch.zeros(6, len(steps._flat_D), dtype=torch.float64)

    def replay(self) -> None:
        line: Any = torch.cuda.current_stream()
        block = len(self.steps.seen) % 2
        assert all(line.is_after(end) for number, end in enumerate(self.steps.seen) if number % 2 == block)
        self.steps.written = line.does_something()
        self.rows.copy_(self.steps._body())


@pytest.mark.parametrize("workers", [3, 6])  # pairs within a step, and from one to the next
@pytest.mark.parametrize("name", ["closed", "layers", "units"])
def test_rows_are_observed_beside_the_steps(name: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in their order, while they are whole: a block is written again only after it has been read."""
    expected = by_hand(PROBLEMS[name](61), workers)
    lines_for_streams(monkeypatch)
    problem = PROBLEMS[name](61)
    steps: Any = captured(problem, balanced=True, workers=workers)
    ordering, graph = steps._ordering, Replayed(steps)
    steps._sorting = Line()
    steps._make_blocks(4, steps._flat_D)
    steps._recorded = Recorded(graph, graph.rows)  # type: ignore[arg-type]
    observe = steps._observe_rows

    def noted(rows: Tensor) -> None:
        line: Any = torch.cuda.current_stream()
        assert line is steps._sorting
        assert line.is_after(steps.written)
        observe(rows)
        steps.seen.append(line.does_something())
        rows.fill_(torch.nan)  # what is read later than now is no longer there

    steps._observe_rows = noted
    for epoch in range(2):
        index = torch.from_numpy(ordering.remaining()).clone()
        steps._index_SN, steps.seen = index[: len(index) // 6 * 6].view(-1, 6), []
        steps._step.zero_()
        steps.epoch(index)
        assert ordering.epoch == epoch + 1
        assert len(steps._events) >= len(steps.seen)
    assert ordering.remaining().tolist() == expected[0]
    torch.testing.assert_close([p.detach() for p in problem.model.parameters()], expected[1])


def by_hand(problem: Problem, workers: int) -> tuple[list[int], list[Tensor]]:
    """The order after two epochs, and the parameters."""
    steps: Any = captured(problem, balanced=True, workers=workers)
    for _ in range(2):
        for index in torch.from_numpy(steps._ordering.remaining()).clone().split(6):
            rows = steps._gradient(tuple(part[index] for part in problem.train)).clone()
            steps._optimizer.step()
            steps._observe_rows(rows)
    return steps._ordering.remaining().tolist(), [p.detach() for p in problem.model.parameters()]


class Listener:
    """An ordering that remembers."""

    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def observe(self, rows: Tensor) -> None:
        self.heard += rows.clone().unbind()


SIZES = [4] * 150 + [3] + [4] * 3  # more than are collected, then a short batch, then the next epoch


def test_rows_are_handed_over_in_their_order_and_all_of_them() -> None:
    listener, like = Listener(), torch.zeros(5)
    collector = Collector(listener, 4, 64, like)  # type: ignore[arg-type]
    for number, size in enumerate(SIZES):
        collector.place(size).fill_(number)
    collector.flush()
    collector.flush()
    assert [rows.shape for rows in listener.heard] == [(size, 5) for size in SIZES]
    assert [int(rows[0, 0]) for rows in listener.heard] == list(range(len(SIZES)))


@pytest.mark.parametrize("sizes", [[4] * 64, [4] * 5 + [3], [4], [2]])
def test_late_rows_are_handed_over_in_their_order_and_all_of_them(sizes: list[int]) -> None:
    listener = Listener()
    late: Any = SimpleNamespace(sizes=lambda units: ((units,),), rows=lambda kept, x: x * kept[0][:, :, None])
    collector = LateCollector(listener, late, 4, 64, torch.zeros(5))  # type: ignore[arg-type]
    for start in (0.0, 100.0):  # nothing is left from one block of steps to the next
        x = torch.arange(sum(sizes) * 5.0).view(-1, 5)
        for number, size in enumerate(sizes):
            collector.places(size)[0].fill_(start + number)
        collector.flush((x,))
        expected = [(start + number) * part for number, part in enumerate(x.split(sizes))]
        assert all(torch.equal(*both) for both in zip(listener.heard, expected, strict=True))
        listener.heard.clear()

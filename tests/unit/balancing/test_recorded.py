"""Which blocks of rows are recorded, here without a GPU: a graph is stood in for by what it would do again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from _inputs import randn
from cdgrab.balancing import recorded, tables
from cdgrab.balancing.recorded import RecordedBlocks
from cdgrab.balancing.rules import Greedy, Rule, Walk


class Graph:
    """Does again what was done when it was recorded."""

    replays = 0
    again: Callable[[], Any]

    def replay(self) -> None:
        Graph.replays += 1
        self.again()

    def pool(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were balanced at once; and everything that would need a GPU stood in for."""
    found: list[int] = []
    under_way: list[Graph] = []
    Graph.replays = 0

    def balance_blocks(rows: Tensor, minus: Tensor, running_sum: Tensor, rule: Rule) -> Tensor:  # noqa: ARG001
        decided = torch.zeros(4, rows.shape[0] * rows.shape[1], dtype=torch.float64)

        def work() -> None:
            found.append(decided.shape[1])
            for k, row in enumerate((rows - minus).flatten(0, 1)):
                sign = 1.0 if float(running_sum @ row) <= 0 else -1.0
                running_sum.add_(sign * row)
                decided[:2, k] = sign

        if under_way:
            under_way[0].again = work
        else:
            work()
        return decided

    @contextmanager
    def recording(graph: Any, device: torch.device, pool: Any) -> Iterator[None]:  # noqa: ARG001
        under_way.append(graph)
        yield
        under_way.clear()

    monkeypatch.setattr(tables, "balance_blocks", balance_blocks)
    monkeypatch.setattr(recorded, "recording", recording)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    return found


def signs(blocks: Any, places: list[Tensor], rule: Rule, steps: int = 12) -> tuple[list[Tensor], Tensor]:
    """Of rows that come to lie in these places in turn."""
    running_sum, found = torch.zeros(places[0].shape[-1]), []
    minus = torch.zeros_like(places[0])
    for step in range(steps):
        place = places[step % len(places)]
        place.copy_(randn(*place.shape, seed=step))
        found.append(blocks(place, minus, running_sum, rule))
    return found, running_sum


@pytest.mark.parametrize(("places", "replays"), [(1, 11), (3, 9), (12, 0)])
def test_rows_that_lie_where_others_lay(places: int, replays: int) -> None:
    here = [torch.zeros(2, 3, 5) for _ in range(places)]
    found, running_sum = signs(RecordedBlocks(), here, Greedy())
    assert Graph.replays == replays
    expected, total = signs(tables.balance_blocks, here, Greedy())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # also of earlier steps
    assert torch.equal(running_sum, total)


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 2)
    blocks, here = RecordedBlocks(), [torch.zeros(1, 2, 3) for _ in range(3)]
    signs(blocks, here, Greedy())
    assert len(blocks._recorded) == 2
    assert {key[0][0] for key in blocks._recorded} == {place.data_ptr() for place in here[1:]}  # type: ignore[index]


def test_there_is_an_end_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST_RECORDINGS", 1)
    blocks = RecordedBlocks()
    signs(blocks, [torch.zeros(1, 2, 3) for _ in range(3)], Greedy())
    assert len(blocks._recorded) == 1


def test_what_is_not_recorded() -> None:
    for rule, dim in ((Walk(), 5), (Greedy(), recorded.LONG_ROW)):
        blocks = RecordedBlocks()
        signs(blocks, [torch.zeros(1, 2, dim)], rule, steps=4)
        assert not blocks._recorded
    assert Graph.replays == 0

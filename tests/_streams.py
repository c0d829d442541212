"""Stand-ins for CUDA streams and events that know what has happened before what, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Line:
    """Stands in for a stream: knows how much of every other has happened before what it does next."""

    def __init__(self) -> None:
        self.knows: dict[Line, int] = {self: 0}

    def does_something(self) -> tuple[Line, int]:
        self.knows[self] += 1
        return self, self.knows[self]

    def is_after(self, what: tuple[Line, int]) -> bool:
        line, count = what
        return self.knows.get(line, 0) >= count

    def wait_stream(self, other: Line) -> None:
        self._learn(other.knows)

    def wait_event(self, event: Moment) -> None:
        self._learn(event.knew)

    def _learn(self, knows: dict[Line, int]) -> None:
        for line, count in knows.items():
            self.knows[line] = max(self.knows.get(line, 0), count)


class Moment:
    """Stands in for an event."""

    knew: dict[Line, int]

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self) -> None:
        self.knew = dict(torch.cuda.current_stream().knows)  # type: ignore[attr-defined]


def lines_for_streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `torch.cuda` work with lines; the current ones, of which the innermost is the last."""
    current = [Line()]

    @contextmanager
    def on(line: Line) -> Iterator[None]:
        current.append(line)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    return current

"""Pairs that are replayed on a GPU, here without a graph."""

from __future__ import annotations

from typing import Any, ClassVar

from cdgrab.ghost.pairs import ReplayedPairs
from cdgrab.ghost.passes import Pass


class Copied(ReplayedPairs):
    """`ReplayedPairs` without graphs: on copies, and only what fits."""

    made: ClassVar[list[Copied]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns = 0
        self.made.append(self)

    def record(self) -> None:
        pass

    def _take(self, coming: Pass, into: Pass) -> bool:
        taken = super()._take(coming, into)
        self.turns += taken
        return taken

"""Progress, as the experiments see it: they say what they do, somebody may be looking."""

from __future__ import annotations

import threading


class Watch:
    """Nobody is looking. The command line shows a bar instead.

    Attributes:
        stop: Set when the work should end early; threads look at it.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()

    def begin(self, what: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def step(self, detail: str = "") -> None:
        """One step is done."""

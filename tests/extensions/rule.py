"""A rule: a row is flipped only if the running sum points its way by more than a part of its squared length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Lazy:
    """The larger `slack` is, the more pairs keep their order."""

    def __init__(self, rng: np.random.Generator, slack: float = 0.5) -> None:
        self.slack, self._rng = slack, rng  # nothing is drawn

    def start_epoch(self, epoch: int, num_rows: int) -> None: ...

    def thresholds(self, num_rows: int, lengths: Callable[[], Any]) -> Any:
        assert len(lengths()) == num_rows
        return self.slack * lengths()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

"""The signs of an epoch as they are decided, and the order they make."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from cdgrab.order.fill import SignArray, next_order, pair_signs
from cdgrab.units import IntArray

Decided = tuple[IntArray, SignArray]


class Decisions:
    """Workers and signs of units, for each worker in the order in which it visited them."""

    def __init__(self) -> None:
        self._parts: list[Decided] = []

    def append(self, workers_N: IntArray, signs_N: SignArray) -> None:
        self._parts.append((workers_N, signs_N))

    def joined(self) -> Decided:
        """Everything decided so far."""
        workers = np.concatenate([part[0] for part in self._parts] or [np.zeros(0, dtype=np.int64)])
        signs = np.concatenate([part[1] for part in self._parts] or [np.zeros(0, dtype=np.int8)])
        self._parts = [(workers, signs)]
        return workers, signs

    def replace(self, decided: Decided) -> None:
        self._parts = [decided]

    def digest(self) -> int:
        """A number that is the same on two ranks if and only if (practically) they have decided the same."""
        workers, signs = self.joined()
        return zlib.crc32(signs.tobytes(), zlib.crc32(workers.tobytes()))

    def append_pairs(self, workers_N: IntArray, signs_N: SignArray) -> None:
        """One sign per pair: the first unit carries it, the second its opposite."""
        self.append(np.repeat(workers_N, 2), pair_signs(signs_N))

    def arrange(self, worker: int, visited_N: IntArray, unvisited_M: IntArray) -> IntArray:
        """The next order of a worker. Units whose sign was not decided stay in the middle."""
        workers, signs = self.joined()
        mine = signs[workers == worker]
        padded = np.zeros(len(visited_N) + len(unvisited_M), dtype=np.int8)
        padded[: len(mine)] = mine
        return next_order(np.concatenate([visited_N, unvisited_M]), padded)

    def state_dict(self) -> dict[str, Any]:
        workers, signs = self.joined()
        return {"workers": torch.from_numpy(workers.copy()), "signs": torch.from_numpy(signs.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parts = [(state["workers"].cpu().numpy().copy(), state["signs"].cpu().numpy().copy())]

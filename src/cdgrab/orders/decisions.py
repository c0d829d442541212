"""The signs of an epoch as they are decided, and the order they make."""

from __future__ import annotations

import zlib
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.lanes import IntArray
from cdgrab.orders.fill import SignArray, next_order, pair_signs

Decided = tuple[IntArray, SignArray]

_MANY = 1024  # pieces that are joined, so that an epoch does not leave thousands of tiny ones


class Decisions:
    """Workers and signs of units, for each worker in the order in which it visited them.

    Signs may be given as a tensor on a GPU. They stay there until somebody wants to know.
    """

    def __init__(self) -> None:
        self._parts: list[Decided] = []
        # Later than all parts, and whether a sign is a pair's. To write them out is some calls; it is done for many.
        self._late: list[tuple[IntArray, SignArray | Tensor, bool]] = []

    def append(self, workers_N: IntArray, signs_N: SignArray | Tensor) -> None:
        self._append(workers_N, signs_N, paired=False)

    def append_pairs(self, workers_N: IntArray, signs_N: SignArray | Tensor) -> None:
        """One sign per pair: the first unit carries it, the second its opposite."""
        self._append(workers_N, signs_N, paired=True)

    def joined(self) -> Decided:
        """Everything decided so far."""
        self._fetch()
        workers = np.concatenate([part[0] for part in self._parts] or [np.zeros(0, dtype=np.int64)])
        signs = np.concatenate([part[1] for part in self._parts] or [np.zeros(0, dtype=np.int8)])
        self._parts = [(workers, signs)]
        return workers, signs

    def replace(self, decided: Decided) -> None:
        self._late = []
        self._parts = [decided]

    def digest(self) -> int:
        """A number that is the same on two ranks if and only if (practically) they have decided the same."""
        workers, signs = self.joined()
        return zlib.crc32(signs.tobytes(), zlib.crc32(workers.tobytes()))

    def _append(self, workers_N: IntArray, signs_N: SignArray | Tensor, *, paired: bool) -> None:
        if len(workers_N) == 0:
            return
        if isinstance(signs_N, Tensor) and signs_N.device.type == "cpu":
            signs_N = signs_N.to(torch.int8).numpy()
        self._late.append((workers_N, signs_N, paired))
        if len(self._late) > _MANY:
            workers, signs, kinds = zip(*self._late, strict=True)
            if len(set(kinds)) == 1 and all(isinstance(part, Tensor) for part in signs):
                self._late = [(np.concatenate(workers), torch.cat(signs), paired)]
            else:
                self._fetch()

    def _fetch(self) -> None:
        """Write out what is late; what is still on a device is brought over in one transfer."""
        late, self._late = self._late, []
        there = [signs for _, signs, _ in late if isinstance(signs, Tensor)]
        here = iter(torch.cat(there).to(torch.int8).cpu().split([len(signs) for signs in there]) if there else ())
        signs = [next(here).numpy() if isinstance(part, Tensor) else part for _, part, _ in late]
        start = 0
        for paired, group in groupby(kind for _, _, kind in late):
            stop = start + len(list(group))
            workers_N = np.concatenate([workers for workers, _, _ in late[start:stop]])
            signs_N = np.concatenate(signs[start:stop])
            self._parts.append((np.repeat(workers_N, 2), pair_signs(signs_N)) if paired else (workers_N, signs_N))
            start = stop

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
        self._late = []
        self._parts = [(state["workers"].cpu().numpy().copy(), state["signs"].cpu().numpy().copy())]

"""The signs of an epoch, as they are decided."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.lanes import BoolArray
from cdgrab.orders.fill import SignArray, pair_signs

_MANY = 1024  # arrays that are joined, so that an epoch does not leave thousands of tiny ones


class Decisions:
    """One line of signs for every row that lanes balance in step: a pair of visits, or a visit.

    Signs may be given as a tensor on a GPU. They stay there until somebody asks.

    Args:
        num_lanes: Whose signs these are.
        paired: Whether a sign is that of a pair.
    """

    def __init__(self, num_lanes: int, *, paired: bool) -> None:
        self._num_lanes, self._paired = num_lanes, paired
        self._signs: list[SignArray] = []
        self._late: list[tuple[SignArray | Tensor, BoolArray | None]] = []  # later than all others

    def append(self, signs_K: SignArray | Tensor, lanes_pL: BoolArray | None = None) -> None:
        """Take the signs of some lines, lane by lane; `lanes_pL` says whose they are, None: everybody's."""
        self._late.append((signs_K, lanes_pL))
        if len(self._late) > _MANY:
            self._fetch()

    def joined(self) -> SignArray:
        """All lines so far, 0 where a lane has no sign."""
        self._fetch()
        return self._join()

    def replace(self, signs_PL: SignArray) -> None:
        """Take the signs that another rank has decided."""
        self._late, self._signs = [], [signs_PL]

    def of_units(self) -> SignArray:
        """The signs of units, visit by visit."""
        return pair_signs(self.joined()) if self._paired else self.joined()

    def digest(self) -> int:
        """A number that is the same on two ranks if and only if (practically) they have decided the same."""
        return zlib.crc32(self.joined().tobytes())

    def state_dict(self) -> dict[str, Any]:
        return {"signs": torch.from_numpy(self.joined().copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._late, self._signs = [], [state["signs"].cpu().numpy().copy()]

    def _fetch(self) -> None:
        """Bring over what is on a device, in one transfer."""
        late, self._late = self._late, []
        there = [signs for signs, _ in late if isinstance(signs, Tensor)]
        here = iter(torch.cat(there).to(torch.int8).cpu().split([len(signs) for signs in there]) if there else ())
        for part, lanes_pL in late:
            signs_K = next(here).numpy() if isinstance(part, Tensor) else part
            if lanes_pL is None:
                self._signs.append(signs_K.reshape(-1, self._num_lanes).astype(np.int8, copy=False))
                continue
            line = np.zeros(lanes_pL.shape, dtype=np.int8)
            line[lanes_pL] = signs_K
            self._signs.append(line)
        if len(self._signs) > _MANY:
            self._join()

    def _join(self) -> SignArray:
        joined = np.concatenate([np.zeros((0, self._num_lanes), dtype=np.int8), *self._signs])
        self._signs = [joined]
        return joined

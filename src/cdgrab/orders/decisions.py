"""Collects the signs of an epoch."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.fields import Fields
from cdgrab.lanes import BoolArray
from cdgrab.orders.fill import SignArray, pair_signs

_MOST_PARTS = 1024  # then they are joined, so that an epoch does not leave thousands of tiny arrays


class Decisions:
    """The signs of all lanes, one line for every visit, or for every pair of visits.

    Signs given as a tensor on a GPU stay there until they are asked for.

    Args:
        num_lanes: The number of signs in a line.
        paired: Whether a sign belongs to a pair of units.
    """

    def __init__(self, num_lanes: int, *, paired: bool) -> None:
        self._num_lanes, self._paired = num_lanes, paired
        self._signs: list[SignArray] = []
        self._pending: list[tuple[SignArray | Tensor, BoolArray | None]] = []  # later than all of `_signs`

    def append(self, signs_K: SignArray | Tensor, lanes_pL: BoolArray | None = None) -> None:
        """Take the signs of some lines, lane by lane; `lanes_pL` says which lanes have one, None: all."""
        self._pending.append((signs_K, lanes_pL))
        if len(self._pending) > _MOST_PARTS:
            self._fetch()

    def joined(self) -> SignArray:
        """All lines so far, 0 where a lane has no sign."""
        self._fetch()
        return self._join()

    def replace(self, signs_PL: SignArray) -> None:
        """Replace all signs by those of another rank."""
        self._pending, self._signs = [], [signs_PL]

    def of_units(self) -> SignArray:
        """The signs of the units, visit by visit."""
        return pair_signs(self.joined()) if self._paired else self.joined()

    def digest(self) -> int:
        """A checksum of all signs: ranks compare theirs."""
        return zlib.crc32(self.joined().tobytes())

    @property
    def visits(self) -> int:
        """The number of visits that have signs."""
        lines = len(self.joined())
        return 2 * lines if self._paired else lines

    def state_dict(self) -> dict[str, Any]:
        """One bit a sign; another if there are lanes without."""
        signs_PL = self.joined()
        none = signs_PL == 0
        return {
            "lines": len(signs_PL),
            "minus": torch.from_numpy(np.packbits(signs_PL < 0)),
            "none": torch.from_numpy(np.packbits(none) if none.any() else np.zeros(0, dtype=np.uint8)),
        }

    def load_state_dict(self, state: Fields) -> None:
        lines = state.whole("lines")
        number = lines * self._num_lanes
        length = -(-number // 8)
        minus = np.unpackbits(state.tensor("minus", length, dtype=torch.uint8).cpu().numpy(), count=number)
        signs_N = 1 - 2 * minus.astype(np.int8)
        none = state.tensor("none", None, dtype=torch.uint8)
        if len(none):
            none = state.tensor("none", length, dtype=torch.uint8)
            signs_N[np.unpackbits(none.cpu().numpy(), count=number).astype(bool)] = 0
        self._pending, self._signs = [], [signs_N.reshape(lines, self._num_lanes)]

    def _fetch(self) -> None:
        """Turn the pending signs into lines; those on a device come in one transfer."""
        pending, self._pending = self._pending, []
        tensors = [signs for signs, _ in pending if isinstance(signs, Tensor)]
        copies = iter(torch.cat(tensors).to(torch.int8).cpu().split([len(t) for t in tensors]) if tensors else ())
        for part, lanes_pL in pending:
            signs_K = next(copies).numpy() if isinstance(part, Tensor) else part
            if lanes_pL is None:
                self._signs.append(signs_K.reshape(-1, self._num_lanes).astype(np.int8, copy=False))
                continue
            line = np.zeros(lanes_pL.shape, dtype=np.int8)
            line[lanes_pL] = signs_K
            self._signs.append(line)
        if len(self._signs) > _MOST_PARTS:
            self._join()

    def _join(self) -> SignArray:
        joined = np.concatenate([np.zeros((0, self._num_lanes), dtype=np.int8), *self._signs])
        self._signs = [joined]
        return joined

"""Layers of a pass that are looked at later, several at a time: on a GPU a hook had better have next to nothing to do.

All steps of a small model wait for its hooks. So they only note what comes by. Once it is much, or at the end of the
pass, it is copied to where recordings read it, or turned into short rows by what has been recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cdgrab.ghost.passes import Called, Seen
from cdgrab.ghost.plan import Layer, changed_in_place
from cdgrab.ghost.sketch import Sketcher
from cdgrab.hooks.engine import aside, place_of
from cdgrab.hooks.replayed import LEAST_ROOM, Replays, recordable, room_for, trained

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering


class PutOff:
    """Layers of the pass under way that have not been looked at.

    Args:
        ordering: Copies what layers saw, if that is what is wanted.
        layers: That are watched.
        sketcher: Takes short rows, if those are wanted.
        replays: Find what some layers add to those.
    """

    def __init__(self, ordering: Ordering, layers: list[Layer], sketcher: Sketcher | None, replays: Replays) -> None:
        self._ordering, self._layers, self._sketcher, self._replays = ordering, layers, sketcher, replays
        self.place: tuple[int, int] | None = None  # device and stream of layers that are put off; None: none are
        self.trained: tuple[bool, ...] = ()  # which parameters are, in such a pass
        self.counted = True  # whether there might be too many bytes
        self._num = 0  # examples
        self._noted: list[tuple[Called, Tensor, int]] = []  # with the versions of their gradients
        self._used: list[Called] = []  # that have been looked at
        self._kept: list[Seen] = []  # that were noted, and where they stay until they are looked at
        self._bytes = 0  # of what is noted, if it is counted
        self._room = 0  # bytes, after which they are looked at
        self._light: torch.Size | None = None  # of the first gradient of a pass that would not have had to be counted

    def begin(self, grad: Tensor, num: int, *, possible: bool, broken_off: bool) -> None:
        """A pass with so many examples, in which this gradient comes first; the last one may have been broken off."""
        self._noted, self._used, self._kept, self._bytes, self._num = [], [], [], 0, num
        self.place = place_of(grad) if possible and self._pays(grad) else None
        if self.place is not None:
            self.trained = trained(layer.module for layer in self._layers)
            self._replays.begin(self.trained)
            # Passes that begin alike are taken to be of one size, unless the last one never came to its end.
            self.counted, self._light = broken_off or self._light != grad.shape, grad.shape

    def note(self, called: Called, grad: Tensor) -> None:
        """A layer whose gradient is there."""
        self._noted.append((called, grad, grad._version))
        if self.counted:
            self._make_room()

    def finish(self) -> tuple[list[Seen], list[Called]]:
        """At the end of the pass: what has been kept of layers, and which of them were put off at all."""
        if self._noted:
            self._look()
        kept, self._kept = self._kept, []
        used, self._used = self._used, []
        return kept, used

    def _pays(self, grad: Tensor) -> bool:
        """Whether layers of a pass are looked at together, to be replayed."""
        if not recordable(grad):
            return False
        if self._sketcher is None:
            self._room = LEAST_ROOM  # for copies that are made at once
            return self._ordering._looks_later
        if not self._replays.possible or not self._sketcher.settled(self._ordering._epoch):
            return False
        self._room = self._room or room_for(grad)
        return True

    def _make_room(self) -> None:
        """Look at what has been put off, once it is much."""
        called, grad, _ = self._noted[-1]
        self._bytes += called.seen(grad).nbytes
        if self._bytes > self._room:
            self._light = None
            with aside(grad.device):
                self._look()

    def _look(self) -> None:
        """At what has been put off, which is not any longer."""
        noted, self._noted, self._bytes = self._noted, [], 0
        seen = []
        for called, grad, version in noted:
            if grad._version != version:
                raise changed_in_place(called.layer)
            seen.append(called.seen(grad))
            self._used.append(called)
        if self._sketcher is None:
            self._kept += self._ordering._keep_seen(seen, len(self._kept))
            return
        nbytes = sum(one.nbytes for one in seen)
        self._sketcher.add_piece(self._replays(seen, nbytes, self._num, self._sketcher.version))

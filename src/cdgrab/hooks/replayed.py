"""Short rows of a pass, replayed: on a GPU the many small operations of a sketch take longer to launch than to do.

What layers saw is kept until it is looked at, several layers at once. What is done with it is recorded as a CUDA graph:
with little, on copies. In a training loop tensors come to lie where those of the step before were, so with more, where
it is; but if it moves about, on copies too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdgrab.ghost.passes import Seen, tensors_of
from cdgrab.ghost.sketch import Joined
from cdgrab.graphs import Copies, recording

log = logging.getLogger("cdgrab")

LEAST_ROOM = 1 << 25  # bytes of what layers see that may be kept
_LITTLE = 1 << 24  # bytes that are copied at once
_MOST_COPIED = 1 << 30  # bytes of copies; larger models keep a GPU busy
_MOST_RECORDED = 64  # at a time
_MOST_RECORDINGS = 256  # in all: where there is no end to them, passes are not alike
_MOST_KNOWN = 256
_MOST_MOVES = 16  # of tensors, before copies are made


Make = Callable[[list[Seen]], Joined]


def recordable(grad: Tensor) -> bool:
    """Whether a pass with this gradient in it can be recorded."""
    return grad.is_cuda and not torch.cuda.is_current_stream_capturing()  # or somebody records the whole step


def room_for(grad: Tensor) -> int:
    """Bytes of what layers see that may be kept: little beside what there is when a backward pass begins."""
    return max(LEAST_ROOM, torch.cuda.memory_allocated(grad.device) // 8 if grad.is_cuda else 0)


def own_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that are not those of another module inside."""
    return [key for key, parameter in module._parameters.items() if parameter is not None]


def trained(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """Whether they are, module by module."""
    return tuple([p.requires_grad for module in modules for p in module._parameters.values() if p is not None])


class _Kind:
    """What must be the same for one recording to serve; it is long, so its hash is found once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: Hashable) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self.parts == other.parts


class Replays:
    """Parts of the rows of passes, replayed where there has been the like.

    Args:
        make: Finds the parts that some layers give.
    """

    def __init__(self, make: Make) -> None:
        self.possible = True
        self._make = make
        self._known: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Kept] = {}
        self._recordings = 0  # that have been made
        self._joined: dict[Hashable, Joined] = {}  # where recordings of a kind leave what they find
        self._trained: tuple[bool, ...] = ()  # which parameters are, in the pass under way
        self._last: list[_Kind] = []  # of the pass before, one after the other
        self._looks = 0  # in the pass under way
        self._used: list[Joined] = []  # of these, in it
        self._pool: Any | None = None  # of memory: recordings are replayed one after the other
        self._version = 0

    def begin(self, trained: tuple[bool, ...]) -> None:
        """A pass, in which these parameters are trained."""
        self._used.clear()
        self._trained, self._looks = trained, 0

    def __call__(self, seen: list[Seen], nbytes: int, num: int, version: int) -> Joined:
        """What `num` examples get from the layers of a pass that were `seen`; valid until another pass begins.

        They saw so many bytes. With another `version`, `make` does something else, and what was recorded is forgotten.
        """
        if version != self._version:
            self._version = version
            self.forget()
        kind = self._kind_of(seen, num)
        here: Hashable = (kind, places(seen)) if nbytes > _LITTLE else kind
        recorded = self._recorded.get(here) or self._recorded.get(kind)
        if recorded is None and self.possible:
            if self._known[here]:
                recorded = self._record(here, kind, seen, 0 if here is not kind else nbytes)
            elif self._known[kind] > _MOST_MOVES:
                recorded = self._record(kind, kind, seen, nbytes)
        if recorded is not None and all(joined is not recorded.joined for joined in self._used):
            self._used.append(recorded.joined)
            if here is not kind:
                self._known[kind] = 0
            recorded.recording(seen)
            return recorded.joined
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        self._known.update({kind, here})
        return self._make(seen)

    def _kind_of(self, seen: list[Seen], num: int) -> _Kind:
        """What these layers are like; mostly it is what there was in the pass before."""
        parts, place = (num, self._trained, tuple([one.kind for one in seen])), self._looks
        self._looks += 1
        if place == len(self._last) or self._last[place].parts != parts:
            self._last[place:] = [_Kind(parts)]
        return self._last[place]

    def forget(self) -> None:
        """What was recorded."""
        self._known.clear()
        self._recorded.clear()
        self._recordings = 0
        self._joined.clear()
        self._pool = None

    def _record(self, key: Hashable, kind: Hashable, seen: list[Seen], copied: int) -> _Kept | None:
        """With copies of so many bytes, or with none."""
        before = sum(kept.copied for kept in self._recorded.values())
        if self._recordings == _MOST_RECORDINGS or (copied and before + copied > _MOST_COPIED):
            return None
        try:
            if kind not in self._joined:
                self._joined[kind] = self._make(seen)
            if not self._joined[kind].names:
                return None  # of layers that are frozen there is nothing to record
            recording = Recording(seen, self._make, self._joined[kind].rows_ND, self._pool, copied=copied > 0)
        except RuntimeError as error:  # too little memory, or something CUDA does not record
            self.possible = False
            self.forget()
            log.warning("sketches cannot be recorded as a CUDA graph, and are made without: %s", error)
            return None
        self._recordings += 1
        self._pool = recording.pool
        if len(self._recorded) >= _MOST_RECORDED:
            self._drop_first(kind)  # now: recording has waited for its last replay
        kept = self._recorded[key] = _Kept(recording, kind, self._joined[kind], copied)
        return kept

    def _drop_first(self, coming: Hashable) -> None:
        """To make room for a recording of the kind that is `coming`."""
        first = self._recorded.pop(next(iter(self._recorded)))
        if first.kind != coming and all(kept.kind != first.kind for kept in self._recorded.values()):
            del self._joined[first.kind]


def places(seen: list[Seen]) -> Hashable:
    """Where in memory everything is."""
    return tuple([tensor.data_ptr() for tensor in tensors_of(seen)])


class _Kept(NamedTuple):
    recording: Recording
    kind: Hashable
    joined: Joined  # where it leaves what it finds
    copied: int  # bytes


class Recording:
    """What `make` does with some layers of a pass, with what they saw where it is, or with copies of it.

    Args:
        into_ND: Where it is left.
        pool: Memory of other recordings, for what is gone when a replay ends; so all of them may share it.
    """

    def __init__(self, seen: list[Seen], make: Make, into_ND: Tensor, pool: Any | None, *, copied: bool) -> None:
        read, self._copies = seen, None
        if copied:
            read = [one.copied() for one in seen]
            self._copies = Copies(tensors_of(read), tensors_of(seen))
            make(read)  # it takes other kernels, which are loaded and tuned here
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, seen[0].grad.device, pool):
            into_ND.copy_(make(read).rows_ND)
        self.pool = self._graph.pool()

    def __call__(self, seen: list[Seen]) -> None:
        """With layers that saw what is laid out as it was for those that were recorded."""
        if self._copies is not None:
            self._copies(tensors_of(seen))
        self._graph.replay()

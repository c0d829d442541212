"""Short rows of a pass, replayed: on a GPU the many small operations of a sketch take longer to launch than to do.

What layers saw is kept until a pass ends. The second pass of a kind is recorded as a CUDA graph, on copies; later ones
are copied there and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdgrab.ghost.graphs import at_home, copy_all, recording
from cdgrab.ghost.plan import Layer

log = logging.getLogger("cdgrab")

MOST_BYTES = 1 << 30  # of what layers see in a pass that is kept, and of copies; larger models keep a GPU busy
_MOST_RECORDED = 4  # kinds of passes
_MOST_KNOWN = 64

Parts = dict[str, Tensor]  # of rows, by parameter


@dataclass
class Seen:
    """A layer in a pass: its input, and the gradient of its output."""

    layer: Layer
    x: Tensor
    grad: Tensor
    _versions: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = (self.x._version, self.grad._version)

    @property
    def changed(self) -> bool:
        """In place, since then."""
        return self._versions != (self.x._version, self.grad._version)

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.grad.nbytes

    @property
    def kind(self) -> Hashable:
        """What must be the same for one recording to serve: also which parameters are trained."""
        tensors = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in (self.x, self.grad))
        return self.layer.name, tensors, tuple(p.requires_grad for p in self.layer.module.parameters())


def recordable(grad: Tensor) -> bool:
    """Whether a pass with this gradient in it can be recorded."""
    return grad.is_cuda and not torch.cuda.is_current_stream_capturing()  # or somebody records the whole step


class Replays:
    """Parts of the rows of passes, replayed where there have been passes like them.

    Args:
        make: Finds the parts of a pass.
    """

    def __init__(self, make: Callable[[list[Seen]], Parts]) -> None:
        self.possible = True
        self._make = make
        self._known: set[Hashable] = set()
        self._recorded: dict[Hashable, ReplayedParts] = {}
        self._bytes = 0  # of copies
        self._version = 0

    def __call__(self, seen: list[Seen], num: int, version: int) -> Parts:
        """Parts of the rows of a pass of `num` examples; valid until the next.

        With another `version`, `make` does something else, and what was recorded is forgotten.
        """
        if version != self._version:
            self._version = version
            self.forget()
        kind = (num, tuple(one.kind for one in seen))
        recorded = self._recorded.get(kind)
        if recorded is None and kind in self._known and self.possible:
            recorded = self._record(kind, seen)
        if len(self._known) == _MOST_KNOWN:
            self._known.clear()
        self._known.add(kind)
        return self._make(seen) if recorded is None else recorded(seen)

    def forget(self) -> None:
        """What was recorded."""
        self._known.clear()
        self._recorded.clear()
        self._bytes = 0

    def _record(self, kind: Hashable, seen: list[Seen]) -> ReplayedParts | None:
        nbytes = sum(one.nbytes for one in seen)
        if len(self._recorded) == _MOST_RECORDED or self._bytes + nbytes > MOST_BYTES:
            return None
        try:
            recorded = ReplayedParts(seen, self._make)
        except RuntimeError as error:  # too little memory, or something CUDA does not record
            self.possible = False
            self.forget()
            log.warning("sketches cannot be recorded as a CUDA graph, and are made without: %s", error)
            return None
        self._recorded[kind] = recorded
        self._bytes += nbytes
        return recorded


class ReplayedParts:
    """What `make` does with the layers of a pass, recorded on copies of what they saw."""

    def __init__(self, seen: list[Seen], make: Callable[[list[Seen]], Parts]) -> None:
        self._seen = [Seen(one.layer, at_home(one.x), at_home(one.grad)) for one in seen]
        make(self._seen)  # copies may be laid out otherwise than what was seen: other kernels, to be loaded and tuned
        self._graph = torch.cuda.CUDAGraph()
        device = seen[0].grad.device
        # Whatever happens while recording, the stream that was current is current again afterwards.
        here, apart = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(here), recording(self._graph, apart):
            self._parts = make(self._seen)

    def __call__(self, seen: list[Seen]) -> Parts:
        pairs = zip(self._seen, seen, strict=True)
        copy_all(both for there, here in pairs for both in ((there.x, here.x), (there.grad, here.grad)))
        self._graph.replay()
        return dict(self._parts)

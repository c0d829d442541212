"""Short rows of a pass, replayed: on a GPU the many small operations of a sketch take longer to launch than to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdgrab.ghost.graphs import at_home, copy_all, recording
from cdgrab.ghost.plan import Layer

Parts = dict[str, Tensor]  # of rows, by parameter


@dataclass
class Seen:
    """A layer in a pass: its input, and the gradient of its output."""

    layer: Layer
    x: Tensor
    grad: Tensor

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.grad.nbytes


def signature(seen: list[Seen]) -> list[object]:
    """Passes with the same one can be replayed on each other's recording."""
    return [
        (one.layer.name, [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one.x, one.grad)]) for one in seen
    ]


class ReplayedParts:
    """What `make` does with the layers of a pass, recorded on copies of what they saw.

    Args:
        seen: A pass; what comes later must have its signature.
        make: Finds parts of rows; has run before, so that everything it needs is there.
    """

    def __init__(self, seen: list[Seen], make: Callable[[list[Seen]], Parts]) -> None:
        self._seen = [Seen(one.layer, at_home(one.x), at_home(one.grad)) for one in seen]
        self._graph = torch.cuda.CUDAGraph()
        device = seen[0].grad.device
        # Whatever happens while recording, the stream that was current is current again afterwards.
        here, apart = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(here), recording(self._graph, apart):
            self._parts = make(self._seen)

    def __call__(self, seen: list[Seen]) -> Parts:
        """Parts of the rows of another pass; valid until the next."""
        pairs = zip(self._seen, seen, strict=True)
        copy_all(both for there, here in pairs for both in ((there.x, here.x), (there.grad, here.grad)))
        self._graph.replay()
        return dict(self._parts)

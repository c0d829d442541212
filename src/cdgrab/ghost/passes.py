"""What a backward pass leaves of its examples: records, or what layers saw, from which records can be made later.

On a GPU the small operations that make records take longer to launch than to do. Where they are recorded as part of
something larger, all that is wanted of a pass are the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.ghost.plan import Layer
from cdgrab.ghost.records import Record, total
from cdgrab.graphs import at_home

Batch = dict[str, Record]  # by the name of the parameter
Parts = dict[str, list[Record]]  # of each of its uses


class Seen(NamedTuple):
    """A layer in a pass: its input, and the gradient of its output, of this `shape`, which may lie there in another."""

    layer: Layer
    x: Tensor
    grad: Tensor
    shape: torch.Size
    x_version: int
    grad_version: int

    @classmethod
    def of(cls, layer: Layer, x: Tensor, grad: Tensor, shape: torch.Size) -> Seen:
        return cls(layer, x, grad, shape, x._version, grad._version)

    def copied(self) -> Seen:
        return Seen.of(self.layer, at_home(self.x), at_home(self.grad), self.shape)

    @property
    def changed(self) -> bool:
        """In place, since then."""
        return self.x._version != self.x_version or self.grad._version != self.grad_version

    @property
    def kind(self) -> Hashable:
        """What must be the same for one recording to serve."""
        x, grad = self.x, self.grad
        return self.layer.name, x.shape, x.stride(), x.dtype, grad.shape, grad.stride(), grad.dtype, self.shape


@dataclass(frozen=True, eq=False)
class Pass:
    """The examples of one backward pass.

    Args:
        parts: Records.
        seen: Layers that have not been looked at yet.
        num: Of examples.
        make: Finds the records of so many examples in what was seen.
        trained: Which parameters were.
    """

    parts: Parts
    seen: list[Seen] = field(default_factory=list)
    num: int = 0
    make: Callable[[list[Seen], int], Parts] | None = None
    trained: tuple[bool, ...] = ()

    @classmethod
    def of(cls, records: Batch) -> Pass:
        return cls({name: [record] for name, record in records.items()})

    def records(self) -> Batch:
        """Of all layers, one for each parameter."""
        parts = {name: list(uses) for name, uses in self.parts.items()}
        if self.seen:
            assert self.make is not None
            for name, uses in self.make(self.seen, self.num).items():
                parts.setdefault(name, []).extend(uses)
        return {name: total(uses) for name, uses in parts.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """All there are."""
        kept = [tensor for uses in self.parts.values() for record in uses for tensor in record.tensors]
        return [tensor for one in self.seen for tensor in (one.x, one.grad)] + kept

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def kind(self) -> Hashable:
        """What must be the same for one recording to serve."""
        parts = tuple(
            (name, type(record), *((t.shape, t.dtype, t.device) for t in record.tensors))
            for name, uses in self.parts.items()
            for record in uses
        )
        where = self.seen[0].grad.device if self.seen else None
        return self.num, self.trained, where, tuple([one.kind for one in self.seen]), parts

    def copied(self) -> Pass:
        """With tensors that stay where they are."""
        return self._with(at_home(tensor) for tensor in self.tensors)

    def negated(self) -> Pass:
        """Gradients of the opposite sign; those that layers saw are changed in place."""
        if self.seen:
            torch._foreach_neg_([one.grad for one in self.seen])
        return replace(self, parts={name: [record.negated() for record in uses] for name, uses in self.parts.items()})

    def _with(self, tensors: Iterator[Tensor]) -> Pass:
        seen = [Seen.of(one.layer, next(tensors), next(tensors), one.shape) for one in self.seen]
        parts = {
            name: [record.like(tuple(next(tensors) for _ in record.tensors)) for record in uses]
            for name, uses in self.parts.items()
        }
        return replace(self, seen=seen, parts=parts)

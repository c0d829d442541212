"""What a backward pass leaves of its examples: records, or what layers saw, from which records can be made later.

On a GPU the small operations that make records take longer to launch than to do. Where they are recorded as part of
something larger, all that is wanted of a pass are the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cdgrab.ghost.plan import Layer
from cdgrab.ghost.records import Record, total
from cdgrab.graphs import at_home, copy_all

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
        """What must be the same for one recording to serve, where it lies or on copies."""
        return self.kind_of_copies, self.x.stride(), self.grad.stride()

    @property
    def kind_of_copies(self) -> Hashable:
        """What must be the same for one recording to serve, on copies."""
        x, grad = self.x, self.grad
        return self.layer.name, x.shape, x.dtype, grad.shape, grad.dtype, grad.device, self.shape


class Home:
    """Where what the layers of a pass saw is copied to, so that it is in the same place for every pass.

    Layers come a few at a time, while the pass goes on: nothing else need be kept of them then.
    """

    def __init__(self) -> None:
        self._copies: list[Seen] = []  # which must stay where they are
        self._kinds: list[Hashable] = []

    def settle(self, copies: list[Seen]) -> None:
        """From now on, copies of passes that are like this one go to where this one is."""
        self._copies, self._kinds = copies, [one.kind_of_copies for one in copies]

    def keep(self, seen: list[Seen], start: int) -> list[Seen]:
        """Copies of these layers, of which the first is number `start` of the pass.

        Once it is settled, what is given back of a layer unlike the one that was there is no copy.
        """
        if not self._copies:
            return [one.copied() for one in seen]
        found, pairs = [], []
        for place, one in enumerate(seen, start):
            if place < len(self._kinds) and one.kind_of_copies == self._kinds[place]:
                there = self._copies[place]
                pairs += [(there.x, one.x), (there.grad, one.grad)]
                found.append(there)
            else:
                found.append(one)
        copy_all(pairs)
        return found


@dataclass(frozen=True, eq=False)
class Pass:
    """The examples of one backward pass.

    Args:
        parts: Records.
        seen: Layers that have not been looked at yet.
        num: Of examples.
        trained: Which parameters were.
        make: Finds the records of so many examples in what was seen, of the parameters that were trained.
        size: Bytes of what all layers saw, also of those that have been looked at.
    """

    parts: Parts
    seen: list[Seen] = field(default_factory=list)
    num: int = 0
    trained: tuple[bool, ...] = ()
    make: Callable[[list[Seen], int, tuple[bool, ...]], Parts] | None = None
    size: int = 0

    @classmethod
    def of(cls, records: Batch) -> Pass:
        return cls({name: [record] for name, record in records.items()})

    def records(self) -> Batch:
        """Of all layers, one for each parameter."""
        parts = {name: list(uses) for name, uses in self.parts.items()}
        if self.seen:
            assert self.make is not None
            for name, uses in self.make(self.seen, self.num, self.trained).items():
                parts.setdefault(name, []).extend(uses)
        return {name: total(uses) for name, uses in parts.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """All there are."""
        return [tensor for one in self.seen for tensor in (one.x, one.grad)] + self.tensors_of_parts

    @property
    def tensors_of_parts(self) -> list[Tensor]:
        return [tensor for uses in self.parts.values() for record in uses for tensor in record.tensors]

    def with_copied_parts(self) -> Pass:
        """The same, with records that stay where they are."""
        parts = {
            name: [record.like(tuple(map(at_home, record.tensors))) for record in uses]
            for name, uses in self.parts.items()
        }
        return replace(self, parts=parts)

    def fits(self, other: Pass) -> bool:
        """Whether what was recorded with the other serves: it is of one kind, and what layers saw has one home."""
        return (
            len(self.seen) == len(other.seen)
            and all(a is b for a, b in zip(self.seen, other.seen, strict=True))
            and (self.num, self.trained, self._kind_of_parts) == (other.num, other.trained, other._kind_of_parts)
        )

    @property
    def kind(self) -> Hashable:
        """What must be the same for one recording to serve."""
        return self.num, self.trained, tuple([one.kind_of_copies for one in self.seen]), self._kind_of_parts

    @property
    def _kind_of_parts(self) -> Hashable:
        return tuple(
            (name, type(record), *((t.shape, t.dtype, t.device) for t in record.tensors))
            for name, uses in self.parts.items()
            for record in uses
        )

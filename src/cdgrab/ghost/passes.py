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

from cdgrab.ghost.plan import Layer, changed_in_place, counted_twice, spent
from cdgrab.ghost.records import Record, total
from cdgrab.graphs import Copies, at_home

Batch = dict[str, Record]  # by the name of the parameter
Parts = dict[str, list[Record]]  # of each of its uses


def is_from_outside(x: Tensor) -> bool:
    """Whether somebody has it in hand, or what it is a view of: a buffer that is filled again, a trained parameter."""
    return x.is_leaf or (x._is_view() and x._base is not None and x._base.is_leaf)


class Called:
    """A layer that was called in a forward pass, with an input that must stay as it is until its gradient comes."""

    __slots__ = ("counted", "layer", "shape", "version", "x")

    def __init__(self, layer: Layer, x: Tensor, shape: torch.Size) -> None:
        self.layer, self.shape = layer, shape
        self.x: Tensor | None = x
        self.version = x._version
        self.counted = False  # whether it was part of a batch

    def seen(self, grad: Tensor) -> Seen:
        """With the gradient that came."""
        x = self.x
        if x is None:
            raise spent(self.layer)
        if self.counted:
            raise counted_twice()
        if x._version != self.version and self.layer.module.weight.requires_grad:  # otherwise nobody needs it
            raise changed_in_place(self.layer)
        return Seen(self.layer, x, grad, self.shape)

    def finish(self, graph_stays: bool) -> None:
        """After a batch. Without the graph its input is not needed again, and must not live as long as the output."""
        self.counted = True
        if not graph_stays:
            self.x = None


class Seen(NamedTuple):
    """A layer in a pass: its input, and the gradient of its output, of this `shape`, which may lie there in another."""

    layer: Layer
    x: Tensor
    grad: Tensor
    shape: torch.Size

    def copied(self) -> Seen:
        return Seen(self.layer, at_home(self.x), at_home(self.grad), self.shape)

    def owned(self) -> Seen:
        """With an input that nobody else has."""
        return self._replace(x=self.x.clone()) if is_from_outside(self.x) else self

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.grad.nbytes

    @property
    def kind(self) -> Hashable:
        """What must be the same for one recording to serve, where it lies or on copies."""
        layer, x, grad, shape = self
        return (
            *(layer.name, shape, x.shape, x.dtype, x.stride(), grad.shape, grad.dtype, grad.stride()),
            grad.get_device(),
        )

    @property
    def kind_of_copies(self) -> Hashable:
        """What must be the same for one recording to serve, on copies."""
        layer, x, grad, shape = self
        return layer.name, shape, x.shape, x.dtype, grad.shape, grad.dtype, grad.get_device()


def tensors_of(seen: list[Seen]) -> list[Tensor]:
    """Inputs and gradients."""
    return [tensor for one in seen for tensor in (one.x, one.grad)]


class Home:
    """Where what the layers of a pass saw is copied to, so that it is in the same place for every pass.

    Layers come a few at a time, while the pass goes on: nothing else need be kept of them then.
    """

    def __init__(self) -> None:
        self._copies: list[Seen] = []  # which must stay where they are
        # By the first of the layers: what they were like the last time, their copies, and how these are made.
        self._known: dict[int, tuple[list[Hashable], list[Seen], Copies]] = {}

    def settle(self, copies: list[Seen]) -> None:
        """From now on, copies of passes that are like this one go to where this one is."""
        self._copies = copies
        self._known.clear()

    def keep(self, seen: list[Seen], start: int) -> list[Seen]:
        """Copies of these layers, of which the first is number `start` of the pass.

        Once it is settled, of a layer unlike the one that was there no more is copied than somebody might change.
        """
        if not self._copies:
            return [one.copied() for one in seen]
        kinds = [one.kind for one in seen]
        known = self._known.get(start)
        if known is not None and known[0] == kinds:
            known[2](tensors_of(seen))
            return known[1]
        return self._keep_others(seen, kinds, start)

    def _keep_others(self, seen: list[Seen], kinds: list[Hashable], start: int) -> list[Seen]:
        there = self._copies[start : start + len(seen)]
        fitting = [one.kind_of_copies == copy.kind_of_copies for one, copy in zip(seen, there, strict=False)]
        fitting += [False] * (len(seen) - len(there))
        come = tensors_of([one for one, fits in zip(seen, fitting, strict=True) if fits])
        copies = Copies(tensors_of([copy for copy, fits in zip(there, fitting, strict=False) if fits]), come)
        copies(come)
        if all(fitting):
            self._known[start] = kinds, there, copies
        return [there[place] if fits else seen[place].owned() for place, fits in enumerate(fitting)]


@dataclass(frozen=True, eq=False)
class Pass:
    """The examples of one backward pass.

    Args:
        parts: Records.
        seen: Layers that have not been looked at yet.
        num: Of examples.
        trained: Which parameters were.
        make: Finds the records of so many examples in what was seen, of the parameters that were trained.
        looked_at: Bytes of what all others saw.
    """

    parts: Parts
    seen: list[Seen] = field(default_factory=list)
    num: int = 0
    trained: tuple[bool, ...] = ()
    make: Callable[[list[Seen], int, tuple[bool, ...]], Parts] | None = None
    looked_at: int = 0

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
    def size(self) -> int:
        """Bytes of what all layers saw."""
        return self.looked_at + sum(one.nbytes for one in self.seen)

    @property
    def tensors(self) -> list[Tensor]:
        """All there are."""
        return tensors_of(self.seen) + self.tensors_of_parts

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

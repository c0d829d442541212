"""Makes rows of the factors of a batch: whole gradients, or sketches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from cdgrab.factors import Factors
from cdgrab.per_example.sketch import Sketch


class RowBuilder(Protocol):
    """Takes the factors of a batch, parameter by parameter, and returns one row per example."""

    @property
    def width(self) -> int:
        """Numbers of a row."""

    def add(self, name: str, factors: Factors) -> None:
        """Take the gradients of a parameter. A call for every use of it adds them up."""

    def alone(self, name: str, factors: Factors) -> Tensor:
        """What these gradients of a parameter add to rows; nothing is added."""

    def remove(self, name: str, part: Tensor) -> None:
        """Take a parameter out of the batch under way; `part` is what it has added."""

    def finish(self) -> Tensor:
        """The rows of the batch, which is over; something has been added."""

    def drop(self) -> None:
        """Drop the factors of an interrupted batch."""


class WholeRows:
    """Builds whole gradients: the parameters side by side, in the order of `shapes`. Exact, `examples x dim`."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self.width = sum(shape.numel() for shape in shapes.values())
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, factors: Factors) -> None:
        rows_ND = factors.rows()
        self._parts[name] = self._parts[name] + rows_ND if name in self._parts else rows_ND

    def alone(self, name: str, factors: Factors) -> Tensor:  # noqa: ARG002
        return factors.rows()

    def remove(self, name: str, part: Tensor) -> None:  # noqa: ARG002
        del self._parts[name]

    def finish(self) -> Tensor:
        parts, self._parts = self._parts, {}
        like = next(iter(parts.values()))
        # A parameter without a gradient counts as zero.
        for name, shape in self._shapes.items():
            if name not in parts:
                parts[name] = like.new_zeros(len(like), shape.numel())
        return torch.cat([parts[name] for name in self._shapes], dim=1)

    def drop(self) -> None:
        self._parts.clear()


class SketchedRows:
    """Builds sketches: short rows of one length, whose inner products approximate those of whole rows."""

    def __init__(self, sketch: Sketch) -> None:
        self._sketch, self.width = sketch, sketch.length

    def add(self, name: str, factors: Factors) -> None:
        sketch = self._sketch
        if name in sketch.paired:
            sketch.add(factors.paired(sketch.paired[name]))
        else:
            sketch.fold(name, self._to_fold(name, factors))

    def alone(self, name: str, factors: Factors) -> Tensor:
        sketch = self._sketch
        if name in sketch.paired:
            return factors.paired(sketch.paired[name])
        return sketch.folding.alone(name, self._to_fold(name, factors))

    def remove(self, name: str, part: Tensor) -> None:  # noqa: ARG002
        self._sketch.add(-part)

    def finish(self) -> Tensor:
        return self._sketch.finish()

    def _to_fold(self, name: str, factors: Factors) -> Tensor:
        spread = self._sketch.spread.get(name)
        return factors.rows() if spread is None else factors.spread(spread)

    def drop(self) -> None:
        self._sketch.drop()

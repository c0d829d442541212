"""The sources `"per_example"` and `"sketch"`: a unit is a single example, seen by the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cdgrab.intake import Sketched
from cdgrab.per_example.capture import ExampleCapture
from cdgrab.per_example.plan import matrices_of
from cdgrab.per_example.row_builders import SketchedRows, WholeRows
from cdgrab.per_example.sketch import DEFAULT_LENGTH, Sketch, checked_length
from cdgrab.sources.port import Attachment, Port
from cdgrab.sources.wrappers import check_same_model, is_fully_sharded, unwrapped


@dataclass(frozen=True, kw_only=True)
class PerExampleSource:
    """Whole gradients of single examples: exact, and `examples x parameters` numbers for every batch.

    Args:
        reduction: What the loss does with the batch.
    """

    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Watch the layers of a model."""
        watched = _watched(port, model, "per_example")
        port.expect(None)
        return ExampleCapture(port, watched, WholeRows(_shapes(watched)), mean=self.reduction == "mean")


@dataclass(frozen=True, kw_only=True)
class SketchSource:
    """A short row for every example, which keeps nearly all of the gain.

    Args:
        reduction: What the loss does with the batch.
        length: Numbers of a sketch, a power of two. Longer ones are closer to exact, and cost more.
    """

    reduction: Literal["mean", "sum"] = "mean"
    length: int = DEFAULT_LENGTH

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)
        checked_length(self.length)

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Watch the layers of a model."""
        watched = _watched(port, model, "sketch", length=self.length)
        sketch = Sketch(_shapes(watched), matrices_of(watched), self.length, port.settings.seed)
        port.expect(Sketched(sketch.length, sketch.watched))
        return ExampleCapture(port, watched, SketchedRows(sketch), mean=self.reduction == "mean")


def _watched(port: Port, model: nn.Module, source: str, length: int | None = None) -> nn.Module:
    """The module whose layers are watched, the same on all ranks."""
    settings = port.settings
    if port.balances and settings.unit_size != 1:
        raise ValueError(
            f"source {source!r} gives gradients of single examples, but unit_size is {settings.unit_size}; make the "
            "ordering with unit_size=1"
        )
    model = unwrapped(model, compiled=False)
    if is_fully_sharded(model):
        raise ValueError("with fully_shard no rank has whole layers to look at; use source 'batch'")
    watched = model.module if isinstance(model, DistributedDataParallel) else model
    if settings.ranks_meet:
        check_same_model(watched, port.group, source=source, length=length)
    return watched


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; say 'mean' or 'sum', as the loss does with the batch")

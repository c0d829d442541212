"""The sources `"per_example"` and `"sketch"`: a unit is a single example; hooks on layers capture its gradient."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cdgrab.intake import Sketched
from cdgrab.per_example.capture import ExampleCapture
from cdgrab.per_example.coverage import Coverage
from cdgrab.per_example.explain import most_extra
from cdgrab.per_example.layers.norms import mixing_layers
from cdgrab.per_example.plan import Plan, make_plan
from cdgrab.per_example.row_builders import SketchedRows, WholeRows
from cdgrab.per_example.sketch import DEFAULT_LENGTH, Sketch, checked_length
from cdgrab.sources.follow import FollowedModel
from cdgrab.sources.port import Attachment, Port
from cdgrab.sources.wrappers import check_same_model, digest_of, is_sharded, unwrapped

log = logging.getLogger("cdgrab")


@dataclass(frozen=True, kw_only=True)
class PerExampleSource:
    """Takes whole gradients of single examples: exact, but `examples x parameters` numbers for every batch.

    Args:
        reduction: Whether the loss is the `"mean"` or the `"sum"` over the batch.
        strict: Whether a parameter that cannot be balanced is an error. If not it is left out, with a warning.
    """

    reduction: Literal["mean", "sum"] = "mean"
    strict: bool = False

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Put hooks on the layers of a model."""
        hooked = _model_to_hook(port, model, "per_example")

        def watch(anew: bool) -> ExampleCapture:
            plan, coverage = _planned(hooked, self.strict)
            port.expect(None, model=digest_of(plan.shapes), anew=anew)
            mean = self.reduction == "mean"
            return ExampleCapture(port, plan, coverage, WholeRows(plan.shapes), mean=mean)

        return FollowedModel(port, hooked, watch)


@dataclass(frozen=True, kw_only=True)
class SketchSource:
    """Takes a short row for every example, which keeps nearly all of the gain.

    Args:
        reduction: Whether the loss is the `"mean"` or the `"sum"` over the batch.
        length: The length of a sketch, a power of two. Longer ones are closer to exact, and cost more.
        strict: Whether a parameter that cannot be balanced is an error. If not it is left out, with a warning.
    """

    reduction: Literal["mean", "sum"] = "mean"
    length: int = DEFAULT_LENGTH
    strict: bool = False

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)
        checked_length(self.length)

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Put hooks on the layers of a model."""
        hooked = _model_to_hook(port, model, "sketch", length=self.length)

        def watch(anew: bool) -> ExampleCapture:
            plan, coverage = _planned(hooked, self.strict)
            sketch = Sketch(plan.shapes, plan.matrices, self.length, port.settings.seed)
            port.expect(Sketched(sketch.length, sketch.watched), model=digest_of(plan.shapes), anew=anew)
            if not anew and port.settings.world.rank == 0:
                log.info(
                    "single examples are ordered by sketches of %d numbers, which add at most about %.0f %% to the "
                    "arithmetic of the watched layers; ordering.explain(model, batch) says more, attach(model, "
                    "source=...) chooses otherwise",
                    self.length,
                    100 * most_extra(plan, coverage, self.length),
                )
            mean = self.reduction == "mean"
            return ExampleCapture(port, plan, coverage, SketchedRows(sketch), mean=mean)

        return FollowedModel(port, hooked, watch)


def _model_to_hook(port: Port, model: nn.Module, source: str, length: int | None = None) -> nn.Module:
    """The module whose layers get hooks; raises `ValueError` if it does not fit the ordering or differs on ranks."""
    settings = port.settings
    if port.balances and settings.unit_size != 1:
        raise ValueError(
            f"source {source!r} gives gradients of single examples, but unit_size is {settings.unit_size}; make the "
            "ordering with unit_size=1"
        )
    model = unwrapped(model, compiled=False)
    hooked = model.module if isinstance(model, DistributedDataParallel) else model
    if settings.ranks_meet:
        check_same_model(hooked, port.group, source=source, length=length)
    return hooked


def _planned(model: nn.Module, strict: bool) -> tuple[Plan, Coverage]:
    """What is watched of a model; raises `ValueError` if that is nothing."""
    plan = make_plan(model, is_sharded=is_sharded(model))
    if not plan.trained:
        raise ValueError("the model has no trainable parameter; there is no gradient to order by")
    mixing = [name for name, module in mixing_layers(model) if module.training]
    if mixing:
        log.info(
            "%d layers of batch normalisation (%s, ...) mix the examples of a batch; what layers see of each example "
            "is balanced",
            len(mixing),
            mixing[0],
        )
    return plan, Coverage(plan.sizes, plan.left_out, strict=strict)


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; pass the reduction of the loss, 'mean' or 'sum'")

"""The source `"auto"`, the default: single examples wherever that can be done, else whole batches."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from torch import nn

from cdgrab.per_example.coverage import NothingToBalance
from cdgrab.per_example.sketch import DEFAULT_LENGTH
from cdgrab.sources.batch import BatchSource
from cdgrab.sources.examples import SketchSource
from cdgrab.sources.port import Attachment, Port

log = logging.getLogger("cdgrab")


@dataclass(frozen=True, kw_only=True)
class AutoSource:
    """Takes sketches of single examples if units are examples, and gradients of batches if they are batches.

    If no layer of the model shows single examples, batches become the units, unless `unit_size` or `lanes` were given.

    Args:
        reduction: Whether the loss is the `"mean"` or the `"sum"` over the batch.
        length: The length of a sketch, a power of two.
        strict: Whether a parameter that cannot be balanced is an error. If not it is left out, with a warning.
    """

    reduction: Literal["mean", "sum"] = "mean"
    length: int = DEFAULT_LENGTH
    strict: bool = False

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Choose a source, say which, and attach it."""
        settings = port.settings
        sketches = SketchSource(reduction=self.reduction, length=self.length, strict=self.strict)
        if not port.balances or settings.unit_size % settings.batch_size == 0:
            if self != AutoSource():
                raise ValueError(
                    "reduction, length and strict are for single examples, but a unit is a batch here; leave them out, "
                    "or make the ordering with unit_size=1"
                )
            return BatchSource().attach(port, model)
        try:
            return sketches.attach(port, model)
        except NothingToBalance as reason:
            if self.strict or not port.make_batches_units():
                raise
            log.warning("whole batches are ordered instead of single examples, which gains less: %s", reason)
            return BatchSource().attach(port, model)

"""A plain module in one process: the row is what `backward()` left in `.grad`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from cdgrab.per_example.engine import at_end_of_pass, current_pass
from cdgrab.sources.flat import flat_grad
from cdgrab.sources.port import Port


class ModuleAttachment:
    """Observes once per backward pass, after all gradients have been accumulated.

    If a unit is several batches (`unit_size` a multiple of the batch), it observes their accumulated gradient after the
    last of them.
    """

    def __init__(self, port: Port, model: nn.Module, passes_per_unit: int) -> None:
        self._port = port
        self._model = model
        self._passes_per_unit = passes_per_unit
        self._passes = 0
        self._task: int | None = None  # the backward pass whose end has a callback
        self._last = -1  # the pass that ended last; passes are numbered as they begin
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ValueError("the model has no trainable parameter; there is no gradient to order by")
        self._handles = [parameter.register_post_accumulate_grad_hook(self._on_grad) for parameter in trainable]

    def settle(self) -> None:
        pass

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_grad(self, parameter: Tensor) -> None:  # noqa: ARG002
        task = current_pass()
        if task != self._task:  # an interrupted pass may have left its number
            self._task = task
            at_end_of_pass(partial(self._on_end_of_backward, task))

    def _on_end_of_backward(self, task: int) -> None:
        if task < self._last:
            raise ValueError(
                "a backward pass took place within another one, and both would count as batches; with activation "
                "checkpointing use use_reentrant=False"
            )
        self._task, self._last = None, task
        self._passes += 1
        if self._passes == self._passes_per_unit:
            self._passes = 0
            with torch.no_grad():
                self._port.observe(flat_grad(self._model))

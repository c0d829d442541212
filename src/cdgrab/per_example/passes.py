"""Which backward pass is under way, whether it is a batch, and what has come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cdgrab.per_example.calls import DeferredCall, InputCall, counted_twice
from cdgrab.per_example.engine import gets_gradient
from cdgrab.per_example.plan import Layer


@dataclass
class BackwardPass:
    """One backward pass; without a `task` there is none under way.

    Attributes:
        task: Its number in autograd.
        is_batch: Whether it leaves gradients in parameters. Otherwise somebody asks for gradients of something else,
            with `torch.autograd.grad`.
        graph_stays: For another pass.
        calls: Of layers whose factors have been taken.
        deferred: Calls of layers that run once more at its end.
    """

    task: int | None = None
    is_batch: bool = False
    graph_stays: bool = True
    calls: list[InputCall] = field(default_factory=list)
    deferred: list[DeferredCall] = field(default_factory=list)

    def defer(self, call: DeferredCall, output: int, grad: Tensor) -> None:
        """Keep the gradient of an output for the end of the pass."""
        if call not in self.deferred:
            call.start()
            self.deferred.append(call)
        call.grads[output], call.used_up = grad, not self.graph_stays


class GradientSinks:
    """The parameters of a model, asked whether the pass under way leaves a gradient in one of them.

    The answer is found at once where the pass begins as the last one did: at the same layer, or with a gradient for the
    same parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._own = {id(parameter) for parameter in parameters}
        self._last = parameters[0]  # that got a gradient in the last batch
        self._first: Layer | None = None  # the layer whose output gradient came first in the last pass

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._last.device

    def behind(self, layer: Layer, output: Tensor) -> Any:
        """The node that leaves a gradient in a parameter of the layer with this output, if that may help."""
        if layer is not self._first or output.grad_fn is None:
            return None
        nodes: Any = output.grad_fn.next_functions
        return next((node for node, _ in nodes if id(getattr(node, "variable", None)) in self._own), None)

    def get_gradient(self, layer: Layer | None, node: Any) -> bool:
        """Whether any of them does, in a pass that begins at this layer, with this node behind it."""
        self._first = layer or self._first
        if node is not None and gets_gradient(node.variable, node):
            return True
        found = next((p for p in (self._last, *self._parameters) if gets_gradient(p)), None)
        self._last = self._last if found is None else found
        return found is not None


class ModelPasses:
    """Passes through the whole model: batches must not outnumber forward ones."""

    def __init__(self) -> None:
        self._forwards = self._batches = 0

    def forward(self) -> None:
        """A forward pass begins."""
        self._forwards += 1

    def batch(self) -> None:
        """A backward pass that was a batch ends."""
        self._batches += 1
        if 0 < self._forwards < self._batches:
            self._batches = self._forwards
            raise counted_twice()

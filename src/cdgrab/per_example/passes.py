"""The backward pass under way: whether it is a batch, and which calls it has reached."""

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
    """One backward pass, or none if `task` is None.

    Attributes:
        task: Its number in autograd.
        is_batch: Whether it leaves gradients in parameters; `torch.autograd.grad` need not.
        graph_stays: Whether the graph is kept for another pass.
        calls: Calls of layers whose factors have been taken.
        deferred: Calls of layers that run again at its end.
    """

    task: int | None = None
    is_batch: bool = False
    graph_stays: bool = True
    calls: list[InputCall] = field(default_factory=list)
    deferred: list[DeferredCall] = field(default_factory=list)

    def defer(self, call: DeferredCall, output: int, grad: Tensor) -> None:
        """Defer a call to the end of the pass, and keep the gradient of one of its outputs."""
        if call not in self.deferred:
            call.start()
            self.deferred.append(call)
        call.grads[output], call.used_up = grad, not self.graph_stays


class GradientSinks:
    """Tells whether the pass under way leaves a gradient in a parameter of the model.

    One look is enough if the pass begins as the last one did: at the same layer, or with a gradient for the same
    parameter.

    Attributes:
        all_known: Whether these are all parameters; if not, more are met as layers run.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, all_known: bool) -> None:
        self.all_known = all_known
        self._parameters = list(parameters)
        self._own = {id(parameter) for parameter in parameters}
        self._last = parameters[0]  # got a gradient in the last batch
        self._first: Layer | None = None  # the layer whose output gradient came first in the last pass

    def add(self, parameter: nn.Parameter) -> None:
        """Ask about another parameter, too."""
        if id(parameter) not in self._own:
            self._own.add(id(parameter))
            self._parameters.append(parameter)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._last.device

    def behind(self, layer: Layer, output: Tensor) -> Any:
        """The node that leaves a gradient in a parameter of this layer, or None if the last pass began elsewhere."""
        if layer is not self._first or output.grad_fn is None:
            return None
        nodes: Any = output.grad_fn.next_functions
        return next((node for node, _ in nodes if id(getattr(node, "variable", None)) in self._own), None)

    def get_gradient(self, layer: Layer | None, node: Any) -> bool:
        """Whether any parameter gets a gradient, in a pass that begins at this layer, with this node behind it."""
        self._first = layer or self._first
        if node is not None and gets_gradient(node.variable, node):
            return True
        found = next((p for p in (self._last, *self._parameters) if gets_gradient(p)), None)
        self._last = self._last if found is None else found
        return found is not None


class ModelPasses:
    """Counts passes through the whole model, and refuses more batches than forward passes."""

    def __init__(self) -> None:
        self._forwards = self._batches = 0

    def forward(self) -> None:
        """Begin a forward pass."""
        self._forwards += 1

    def batch(self) -> None:
        """End a backward pass that was a batch."""
        self._batches += 1
        if 0 < self._forwards < self._batches:
            self._batches = self._forwards
            raise counted_twice()

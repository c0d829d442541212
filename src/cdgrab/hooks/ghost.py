"""Single examples from an ordinary training loop: hooks on the layers of a model, read at the end of `backward()`.

Every layer's input is noted in the forward pass, its output gradient in the backward pass; together they are the
gradients of all examples (`cdgrab.ghost`). What the loop does with the loss does not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from cdgrab.ghost.layers import Records, differentiated, handler_of
from cdgrab.ghost.plan import Layer, find_layers
from cdgrab.ghost.records import Record, total
from cdgrab.ghost.sketch import Sketcher

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering

Consumer = Callable[[dict[str, Record], dict[str, torch.Size]], None]


@dataclass
class _Call:
    """One use of a layer that must be differentiated once more; the gradients of its outputs come one by one."""

    layer: Layer
    args: Any
    kwargs: Any
    grads: list[Tensor | None]


class ExampleAttachment:
    """Gathers the records of a backward pass and hands them over.

    Args:
        ordering: Knows how many examples a batch has.
        model: With layers to watch.
        consume: Takes the records of a batch, by parameter, and the shapes of the parameters.
        mean: Whether the loss is the mean over the batch. Then gradients of a short batch are scaled down, so that
            they weigh as much as all others.
        sketcher: What `consume` makes rows with, if it does; a part of the state.
    """

    def __init__(
        self,
        ordering: Ordering,
        model: nn.Module,
        consume: Consumer,
        *,
        mean: bool,
        sketcher: Sketcher | None = None,
    ) -> None:
        self.sketcher = sketcher
        self._ordering = ordering
        self._consume = consume
        self._mean = mean
        self._queued = False
        self._differentiating = False
        # A parameter with several names, as with tied weights, goes by the first of them.
        self._names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._names[id(parameter)] = name
        self._shapes = {name: dict(model.named_parameters())[name].shape for name in self._names.values()}
        self._records: dict[str, list[Record]] = defaultdict(list)
        self._calls: list[_Call] = []
        self._handles: list[Any] = []
        self._handles.append(model.register_forward_pre_hook(self._before_forward))
        for layer in find_layers(model):
            self._watch(layer)

    def settle(self) -> None:
        pass

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, *_: Any) -> None:
        if self._queued and torch._C._current_graph_task_id() == -1:
            # The backward pass before broke off; what it left is not to be mixed with what comes.
            self._queued = False
            self._records.clear()
            self._calls.clear()

    def _watch(self, layer: Layer) -> None:
        if handler_of(layer.module) is not None:
            self._handles.append(layer.module.register_forward_hook(self._after_known(layer)))
            return
        self._handles.append(layer.module.register_forward_hook(self._after_unknown(layer), with_kwargs=True))

    def _after_unknown(self, layer: Layer) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if self._differentiating or not any(leaf.requires_grad for leaf in outputs):
                return
            call = _Call(layer, args, kwargs, [None] * len(outputs))

            def on_grad(grad: Tensor, place: int) -> None:
                self._queue()
                if not any(known is not None for known in call.grads):
                    self._calls.append(call)
                call.grads[place] = grad

            for place, leaf in enumerate(outputs):
                if leaf.requires_grad:
                    leaf.register_hook(partial(on_grad, place=place))

        return after

    def _after_known(self, layer: Layer) -> Callable[..., None]:
        handler = handler_of(layer.module)
        assert handler is not None

        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if self._differentiating or not output.requires_grad:
                return
            # What comes from outside may be a buffer that is filled again before the pair is complete.
            x = args[0].detach() if args[0].requires_grad else args[0].clone()

            def on_grad(grad: Tensor) -> None:
                self._queue()
                with torch.no_grad():
                    num = self._count(layer, grad)
                    wide = torch.promote_types(grad.dtype, torch.float32)
                    inputs = x if not x.is_floating_point() else x.to(wide)
                    self._keep(layer, handler(module, inputs, grad.to(wide), num), num)

            output.register_hook(on_grad)

        return after

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._on_end_of_backward)

    def _count(self, layer: Layer, grad: Tensor) -> int:
        """How many examples there are; every layer must have them along its first dimension."""
        num = self._ordering._examples_due()
        flattened = grad.ndim == 2 and grad.shape[0] % num == 0 and isinstance(layer.module, nn.Linear)
        if grad.shape[0] != num and not flattened:
            raise ValueError(
                f"layer {layer.name!r} ({type(layer.module).__name__}) has outputs of shape {tuple(grad.shape)}, but "
                f"the batch has {num} examples; examples must come first in every layer (batch_first=True)"
            )
        return num

    def _keep(self, layer: Layer, records: Records, num: int) -> None:
        for key, record in records.items():
            parameter = dict(layer.module.named_parameters()).get(key)
            if parameter is not None and parameter.requires_grad:
                # The mean over fewer examples gives each of them more weight.
                share = num / self._ordering.batch_size if self._mean else 1.0
                self._records[self._names[id(parameter)]].append(record if share == 1 else record.scaled(share))

    def _on_end_of_backward(self) -> None:
        self._queued = False
        calls, self._calls = self._calls, []
        with torch.no_grad():
            self._differentiating = True  # layers run again, and are not to be watched
            try:
                for call in calls:
                    num = self._count(call.layer, next(grad for grad in call.grads if grad is not None))
                    rows = differentiated(call.layer.module, call.args, call.kwargs, call.grads, num)
                    self._keep(call.layer, rows, num)
            finally:
                self._differentiating = False
            records, self._records = self._records, defaultdict(list)
            self._consume({name: total(parts) for name, parts in records.items()}, self._shapes)

"""Single examples from an ordinary training loop: hooks on the layers of a model, read during `backward()`.

A layer's input is kept from the forward pass until its output gradient comes in the backward pass. Both together are
factors of the gradients of all examples, which are made into rows at once, so that nothing of a step is kept. What the
loop does with the loss does not change.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.per_example.calls import DeferredCall, InputCall, not_tensors
from cdgrab.per_example.engine import aside, at_end_of_pass, current_pass, graph_is_kept, register, within_transform
from cdgrab.per_example.first_batch import FirstBatch
from cdgrab.per_example.layers.base import LayerFactors
from cdgrab.per_example.passes import BackwardPass, GradientSinks, ModelPasses
from cdgrab.per_example.plan import Layer, ParameterNames, check_factors, find_layers
from cdgrab.per_example.row_builders import RowBuilder

if TYPE_CHECKING:
    from cdgrab.sources.port import Port


class BatchFactors:
    """Takes the factors of a batch layer by layer: the first batch is checked, and all are made into rows.

    Args:
        layers: Of the model.
        trainable: Its parameters, by name.
        rows: Makes rows of factors.
    """

    def __init__(self, layers: list[Layer], trainable: dict[str, nn.Parameter], rows: RowBuilder) -> None:
        self._rows = rows
        self._names = ParameterNames(layers, trainable)
        self._first_batch = FirstBatch(trainable, self._names.late)

    def add(self, layer: Layer, found: LayerFactors, num: int, share: float) -> None:
        """Take the factors of `num` examples; every example counts as much as `share` says."""
        if self._first_batch.under_way:
            check_factors(layer, found, num)
        for key, factors in found.items():
            if not layer.module.get_parameter(key).requires_grad:
                continue
            name = self._names.of(layer, key)
            if self._first_batch.under_way:
                self._first_batch.add(name, factors)
            self._rows.add(name, factors if share == 1 else factors.scaled(share))

    def finish(self) -> Tensor:
        """The rows of the batch, which is over."""
        if self._first_batch.under_way:
            self._first_batch.finish()
        return self._rows.finish()

    def drop(self) -> None:
        """Forget a batch that broke off."""
        self._rows.drop()
        if self._first_batch.under_way:
            self._first_batch.begin()

    def stop(self) -> None:
        """Leave the parameters alone."""
        self._first_batch.stop()


class ExampleCapture:
    """Finds the rows of every backward pass and observes them.

    Args:
        port: Takes the rows, and knows how many examples a batch has.
        model: With layers to watch.
        rows: Makes rows of factors.
        mean: Whether the loss is the mean over the batch. Then gradients of a short batch are scaled down, so that
            they weigh as much as all others.
    """

    def __init__(self, port: Port, model: nn.Module, rows: RowBuilder, *, mean: bool) -> None:
        self._port, self._mean = port, mean
        layers = find_layers(model)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._factors = BatchFactors(layers, trainable, rows)
        self._sinks = GradientSinks(list(trainable.values()))
        self._model_passes = ModelPasses(model)
        self._pass = BackwardPass()
        self._num = 0  # of examples in it
        self._paused = False  # whether hooks ignore what runs
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for layer in layers:
            after = self._after_deferred if layer.adapter.runs_again else self._after_forward
            self._handles.append(layer.module.register_forward_hook(partial(after, layer), with_kwargs=True))

    def settle(self) -> None:
        """Nothing waits: rows are observed before `backward()` returns."""

    def detach(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._factors.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_a_copy, ()  # hooks are copied and saved with the model, which is watched once

    # In the forward pass

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._paused and not within_transform():
            self._model_passes.forward()

    def _after_forward(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """Keep the input of a layer that needs its input and output gradient only."""
        if self._paused or within_transform():
            return
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
            raise not_tensors(layer, x, output)
        if not output.requires_grad:
            return
        call = InputCall(layer, x, output.shape)
        hook = partial(self._on_gradient, call, self._sinks.behind(layer, output))
        # An operation in place gives a view another history, and the hook would never be called.
        base = output._base if output._is_view() else None
        register(output if base is None or base.numel() != output.numel() else base, hook)

    def _after_deferred(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep what a layer was called with that runs once more at the end of the backward pass."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self._paused or within_transform() or not any(leaf.requires_grad for leaf in outputs):
            return
        layer.adapter.check(layer.name, module)
        layer.adapter.check_call(args, kwargs)
        # The hooks must not hold on to the outputs, which hold on to them.
        call = DeferredCall(layer, args, kwargs, len(outputs))
        for number, leaf in enumerate(outputs):
            if leaf.requires_grad:
                leaf.register_hook(partial(self._on_deferred_gradient, call, number))

    # In the backward pass

    def _on_gradient(self, call: InputCall, sink: Any, grad: Tensor) -> None:
        if self._joins_batch(call.layer, sink):
            self._pass.calls.append(call)
            with aside(grad.device):
                self._add(call.layer, call.factors(grad, self._num))

    def _on_deferred_gradient(self, call: DeferredCall, output: int, grad: Tensor) -> None:
        if self._joins_batch():
            self._pass.defer(call, output, grad)

    def _joins_batch(self, layer: Layer | None = None, sink: Any = None) -> bool:
        """Whether the pass under way, which may begin here, is a batch; `sink` is a node that it may go on to."""
        if current_pass() != self._pass.task:
            self._begin(layer, sink)
        return self._pass.is_batch

    def _begin(self, layer: Layer | None, sink: Any) -> None:
        # If a pass before broke off, what it left is not to be mixed with what comes.
        self._factors.drop()
        is_batch = bool(self._handles) and self._sinks.get_gradient(layer, sink)  # outputs keep hooks when detached
        self._pass = BackwardPass(current_pass(), is_batch, graph_is_kept())
        self._num = self._port.examples_due()
        if is_batch:
            at_end_of_pass(self._on_end_of_backward)

    def _add(self, layer: Layer, found: LayerFactors) -> None:
        # The mean over fewer examples gives each of them more weight.
        share = self._num / self._port.settings.batch_size if self._mean else 1.0
        self._factors.add(layer, found, self._num, share)

    def _on_end_of_backward(self) -> None:
        ended, self._pass = self._pass, BackwardPass()
        self._model_passes.batch()
        with aside(self._sinks.device):
            self._run_again(ended.deferred)
            rows = self._factors.finish()
            for call in ended.calls:
                call.finish(ended.graph_stays)
            self._port.observe(rows)

    def _run_again(self, calls: list[DeferredCall]) -> None:
        self._paused = True  # hooks must not take it for another forward pass
        try:
            for call in calls:
                self._add(call.layer, call.factors(self._num))
                call.finish()
        finally:
            self._paused = False


def _of_a_copy() -> ExampleCapture:
    """What the hooks of a copy of a watched model belong to: it does nothing."""
    capture = ExampleCapture.__new__(ExampleCapture)
    capture._paused = True
    return capture

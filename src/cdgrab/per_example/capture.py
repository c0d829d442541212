"""Captures the gradients of single examples in an ordinary training loop, with hooks on the layers of a model.

A hook keeps a layer's input from the forward pass until its output gradient arrives in the backward pass. Both together
are factors of the gradients of all examples. They are made into rows at once, so that no step keeps its factors. The
loop and its loss do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.per_example.calls import DeferredCall, InputCall, not_tensors
from cdgrab.per_example.coverage import Coverage
from cdgrab.per_example.engine import (
    aside,
    at_end_of_pass,
    current_pass,
    graph_is_kept,
    register,
    whole,
    within_transform,
)
from cdgrab.per_example.first_batch import FirstBatch
from cdgrab.per_example.layers.base import LayerFactors, Unseen
from cdgrab.per_example.passes import BackwardPass, GradientSinks, ModelPasses
from cdgrab.per_example.plan import Layer, ParameterNames, Plan, check_factors
from cdgrab.per_example.positions import Tables
from cdgrab.per_example.row_builders import RowBuilder

if TYPE_CHECKING:
    from cdgrab.sources.port import Port

_NO_LAYER = "no watched layer uses it"
_DIFFERS = (
    "the gradients of single examples do not add up to that of the batch; it is used outside of its layer as well, "
    "where it cannot be watched, or its adapter is wrong"
)
_HALF = (torch.float16, torch.bfloat16)


class BatchFactors:
    """Makes rows of the factors of a batch, layer by layer. The first batch shows what has to be left out.

    Args:
        plan: Of the model.
        coverage: Keeps what is left out.
        rows: Makes rows of factors.
    """

    def __init__(self, plan: Plan, coverage: Coverage, rows: RowBuilder) -> None:
        self.coverage = coverage
        self._rows = rows
        self._names = ParameterNames(plan.layers, plan.trained)
        self._first_batch = FirstBatch(plan.trained, self._names.late)
        self._ignored: set[str] = set()  # names of layers whose parameters are left out
        self._is_empty = True  # whether nothing has been added to the batch under way

    def ignores(self, layer: Layer) -> bool:
        """Whether all parameters of a layer are left out."""
        return layer.name in self._ignored

    def leave_out(self, layer: Layer, reason: str) -> None:
        """Leave a layer out from now on; raises `ValueError` if that is not allowed, or if nothing remains."""
        self._ignored.add(layer.name)
        self.coverage.leave_out(self._names.of_layer(layer), reason)

    def watch(self, layer: Layer, key: str, parameter: nn.Parameter) -> None:
        """Compare the gradients of this tensor in the first batch, too."""
        name = self._names.of(layer, key)
        if name is not None and self._first_batch.under_way:
            self._first_batch.watch(name, parameter)

    def add(self, layer: Layer, found: LayerFactors, num: int, share: float, *, rough: bool) -> None:
        """Take the factors of `num` examples. `share` scales them; `rough` ones were computed in low precision."""
        if self._first_batch.under_way:
            check_factors(layer, found, num)
        for key, factors in found.items():
            name = self._names.of(layer, key)
            if name is None or name in self.coverage.left_out or not layer.module.get_parameter(key).requires_grad:
                continue
            scaled = factors if share == 1 else factors.scaled(share)
            if self._first_batch.under_way:
                self._first_batch.add(name, factors, self._rows.alone(name, scaled), rough=rough)
            self._rows.add(name, scaled)
            self._is_empty = False

    def finish(self, num: int, device: torch.device) -> Tensor:
        """The rows of the batch, which is over and has `num` examples."""
        if self._first_batch.under_way:
            for name, part in self._first_batch.finish().items():
                if part is not None:
                    self._rows.remove(name, part)
                self.coverage.leave_out([name], _NO_LAYER if part is None else _DIFFERS)
        self.coverage.say()
        is_empty, self._is_empty = self._is_empty, True
        return torch.zeros(num, self._rows.width, device=device) if is_empty else self._rows.finish()

    def drop(self) -> None:
        """Drop the factors of an interrupted batch, and begin another."""
        self._rows.drop()
        self._is_empty = True
        if self._first_batch.under_way:
            self._first_batch.begin()

    def stop(self) -> None:
        """Remove the hooks on parameters."""
        self._first_batch.stop()


class ExampleCapture:
    """Makes the rows of every backward pass and hands them to the port.

    Args:
        port: Takes the rows, and knows how many examples a batch has.
        plan: Says which layers are watched.
        coverage: Keeps what is left out.
        rows: Makes rows of factors.
        mean: Whether the loss is the mean over the batch. Then gradients of a short batch are scaled down to the scale
            of a full one.
    """

    def __init__(self, port: Port, plan: Plan, coverage: Coverage, rows: RowBuilder, *, mean: bool) -> None:
        self._port, self._mean = port, mean
        self._factors = BatchFactors(plan, coverage, rows)
        self._sinks = GradientSinks(list(plan.trained.values()), all_known=not plan.is_sharded)
        self._model_passes = ModelPasses()
        self._tables = Tables()
        self._pass = BackwardPass()
        self._num = 0  # examples in the pass under way
        self._paused = False  # whether hooks do nothing
        self._handles: list[Any] = []
        for layer in plan.layers:
            after = self._after_deferred if layer.adapter.runs_again else self._after_forward
            # Before the hook of `fully_shard`, which takes the weights away again.
            handle = layer.module.register_forward_hook(
                partial(after, layer), with_kwargs=True, prepend=plan.is_sharded
            )
            self._handles.append(handle)

    @property
    def coverage(self) -> Coverage:
        """What is balanced, and what is left out."""
        return self._factors.coverage

    def settle(self) -> None:
        """Return at once: rows are observed before `backward()` returns."""

    def detach(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._factors.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_capture, ()  # hooks are copied and saved with the model; only the original captures

    # In the forward pass

    def before_forward(self) -> None:
        """To be called when a forward pass of the whole model begins; without it, passes are not counted."""
        if torch.is_grad_enabled() and not self._is_blind():
            self._model_passes.forward()

    def _is_blind(self) -> bool:
        """Whether hooks have nothing to see: calls of our own, of `torch.func`, and those that are being compiled."""
        return self._paused or within_transform() or torch.compiler.is_compiling()

    def _after_forward(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """Keep the input of a layer until its output gradient arrives."""
        if self._is_blind():
            return
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
            self._factors.leave_out(layer, str(not_tensors(layer, x, output)))
            return
        if not output.requires_grad:
            return
        if not self._sinks.all_known:
            self._meet_weights(layer)
        call = InputCall(layer, x, output.shape)
        hook = partial(self._on_gradient, call, self._sinks.behind(layer, output))
        # An operation in place gives a view another history, and the hook would never be called.
        base = output._base if output._is_view() else None
        register(output if base is None or base.numel() != output.numel() else base, hook)

    def _meet_weights(self, layer: Layer) -> None:
        for key, parameter in layer.module.named_parameters(recurse=False):
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                self._sinks.add(parameter)
                self._factors.watch(layer, key, parameter)

    def _after_deferred(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the arguments of a layer that runs again at the end of the backward pass."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self._is_blind() or not any(leaf.requires_grad for leaf in outputs):
            return
        try:
            layer.adapter.check(layer.name, module)
            layer.adapter.check_call(args, kwargs)
        except ValueError as reason:
            self._factors.leave_out(layer, str(reason))
            return
        # The hooks must not reference the outputs, which reference the hooks.
        call = DeferredCall(layer, args, kwargs, len(outputs))
        for number, leaf in enumerate(outputs):
            if leaf.requires_grad:
                leaf.register_hook(partial(self._on_deferred_gradient, call, number))

    # In the backward pass

    def _on_gradient(self, call: InputCall, sink: Any, grad: Tensor) -> None:
        if self._joins_batch(call.layer, sink):
            self._pass.calls.append(call)
            with aside(grad.device):
                grad = whole(grad)
                layer, index = call.layer, call.index
                if index is not None and self._tables.is_of_positions(layer.name, index, self._pass.task):
                    self._factors.leave_out(layer, f"{layer} is called with the same positions in every batch")
                self._add(layer, partial(call.factors, grad, self._num), [grad])

    def _on_deferred_gradient(self, call: DeferredCall, output: int, grad: Tensor) -> None:
        if self._joins_batch():
            self._pass.defer(call, output, grad)

    def _joins_batch(self, layer: Layer | None = None, sink: Any = None) -> bool:
        """Whether the pass under way is a batch; begins the pass if it is new.

        `sink` is a node that leaves a gradient in a parameter of `layer`, if one is known.
        """
        if current_pass() != self._pass.task:
            self._begin(layer, sink)
        return self._pass.is_batch

    def _begin(self, layer: Layer | None, sink: Any) -> None:
        self._factors.drop()  # of an interrupted pass, if any
        is_batch = bool(self._handles) and self._sinks.get_gradient(layer, sink)  # outputs keep hooks after detach()
        self._pass = BackwardPass(current_pass(), is_batch, graph_is_kept())
        self._num = self._port.examples_due()
        if is_batch:
            at_end_of_pass(self._on_end_of_backward)

    def _add(self, layer: Layer, factors: Callable[[], LayerFactors], grads: list[Tensor | None]) -> None:
        """Add the factors of a layer whose outputs have these gradients, unless it is left out."""
        if self._factors.ignores(layer):
            return
        # The mean over fewer examples gives each of them more weight. All of a global batch have the same on any ranks.
        settings = self._port.settings
        share = self._num / (settings.batch_size * settings.world.size) if self._mean else 1.0
        rough = any(grad is not None and (grad.is_cuda or grad.dtype in _HALF) for grad in grads)
        with self._port.timed():
            try:
                self._factors.add(layer, factors(), self._num, share, rough=rough)
            except Unseen as reason:
                self._factors.leave_out(layer, str(reason))

    def _on_end_of_backward(self) -> None:
        ended, self._pass = self._pass, BackwardPass()
        self._model_passes.batch()
        with aside(self._sinks.device):
            self._run_again(ended.deferred)
            with self._port.timed():
                rows = self._factors.finish(self._num, self._sinks.device)
            for call in ended.calls:
                call.finish(ended.graph_stays)
            self._port.covers(self._factors.coverage.share)
            self._port.observe(rows)

    def _run_again(self, calls: list[DeferredCall]) -> None:
        self._paused = True  # this is no forward pass of the training loop
        try:
            for call in calls:
                self._add(call.layer, partial(call.factors, self._num), call.grads)
                call.finish()
        finally:
            self._paused = False


def _inert_capture() -> ExampleCapture:
    """A capture that does nothing, for the hooks of a copy of the model."""
    capture = ExampleCapture.__new__(ExampleCapture)
    capture._paused = True
    return capture

"""Single examples from an ordinary training loop: hooks on the layers of a model, read during `backward()`.

A layer's input is kept from the forward pass until its output gradient comes in the backward pass. Both together are
factors of the gradients of all examples, which are made into rows at once, so that nothing of a step is kept. What the
loop does with the loss does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cdgrab.per_example.engine import (
    aside,
    at_end_of_pass,
    current_pass,
    gets_gradient,
    graph_is_kept,
    register,
    within_transform,
)
from cdgrab.per_example.first_batch import FirstBatch
from cdgrab.per_example.layers import MIXES_EXAMPLES, LayerFactors, differentiated, handler_of
from cdgrab.per_example.layers.recurrent import Opened, called_with, opens
from cdgrab.per_example.plan import (
    Layer,
    changed_in_place,
    check_count,
    check_mixing,
    check_whole,
    counted_twice,
    find_layers,
    spent,
)
from cdgrab.per_example.row_builders import RowBuilder

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering


class _Call:
    """One call of a known layer, with an input that must stay as it is until its output gradient comes."""

    __slots__ = ("counted", "layer", "shape", "version", "x")

    def __init__(self, layer: Layer, x: Tensor, shape: torch.Size) -> None:
        self.layer, self.shape = layer, shape
        self.x: Tensor | None = x
        self.version = x._version
        self.counted = False  # whether it was part of a batch

    def input(self) -> Tensor:
        """What the layer saw, now that its output gradient is there."""
        if self.x is None:
            raise spent(self.layer)
        if self.counted:
            raise counted_twice()
        # Without a trained weight nobody needs the input.
        if self.x._version != self.version and self.layer.module.weight.requires_grad:
            raise changed_in_place(self.layer)
        return self.x

    def finish(self, graph_stays: bool) -> None:
        """After a batch. Without the graph its input is not needed again, and must not live as long as the output."""
        self.counted = True
        if not graph_stays:
            self.x = None


@dataclass
class _Deferred:
    """One call of a layer that runs once more at the end of the pass; gradients of its outputs come one by one."""

    layer: Layer
    args: Any
    kwargs: Any
    grads: list[Tensor | None]
    versions: list[int]  # of the tensors it was called with
    spent: bool = False  # whether there can be no other backward pass
    counted: bool = False  # whether it was part of a batch

    def is_unchanged(self) -> bool:
        return self.versions == _versions(self.args, self.kwargs)


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


class _Names:
    """What the parameters of layers are called in the model. One with several names goes by the first of them."""

    def __init__(self, layers: list[Layer], parameters: Mapping[str, nn.Parameter]) -> None:
        first = {id(parameter): name for name, parameter in parameters.items()}
        self._names = {
            (layer.name, key): first[id(parameter)]
            for layer in layers
            for key, parameter in layer.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }

    def of(self, layer: Layer, key: str) -> str:
        name = self._names.get((layer.name, key))
        if name is None:
            raise ValueError(
                f"{key!r} of layer {layer.name!r} was frozen when the model was attached and is trained now; call "
                "detach(), and attach the model again"
            )
        return name

    def of_unknown(self, layers: list[Layer]) -> set[str]:
        """Parameters whose gradients are found at the end of the pass."""
        unknown = {layer.name for layer in layers if not layer.known}
        return {name for (layer, _), name in self._names.items() if layer in unknown}


class ExampleCapture:
    """Finds the rows of every backward pass and observes them.

    Args:
        ordering: Takes the rows, and knows how many examples a batch has.
        model: With layers to watch.
        rows: Makes rows of factors.
        mean: Whether the loss is the mean over the batch. Then gradients of a short batch are scaled down, so that
            they weigh as much as all others.

    Attributes:
        observe: Takes the rows of every batch; may be replaced.
    """

    def __init__(self, ordering: Ordering, model: nn.Module, rows: RowBuilder, *, mean: bool) -> None:
        self._ordering, self._rows, self._mean = ordering, rows, mean
        self.observe: Callable[[Tensor], None] = ordering._observe
        layers = find_layers(model)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = _Names(layers, trainable)
        self._first_batch = FirstBatch(trainable, self._names.of_unknown(layers))
        self._trainable = list(trainable.values())
        self._own = {id(parameter) for parameter in self._trainable}
        self._sink = self._trainable[0]  # a parameter that got a gradient in the last batch
        self._first: Layer | None = None  # the layer whose output gradient came first in the last pass
        self._mixing = [(name, m) for name, m in model.named_modules() if isinstance(m, MIXES_EXAMPLES)]
        self._task: int | None = None  # the backward pass under way
        self._num = 0  # of its examples
        self._is_batch = False  # whether it leaves gradients in parameters
        self._graph_stays = True  # for another pass
        self._used: list[_Call] = []  # by it
        self._deferred: list[_Deferred] = []
        self._opened: dict[nn.Module, Opened] = {}
        self._differentiating = self._detached = False
        self._forwards = self._backwards = 0  # passes through the whole model, and those that were batches
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for layer in layers:
            after = self._after_known if layer.known else self._after_unknown
            self._handles.append(layer.module.register_forward_hook(after(layer), with_kwargs=True))

    def settle(self) -> None:
        """Nothing waits: rows are observed before `backward()` returns."""

    def detach(self) -> None:
        self._detached = True  # outputs that are there still have their hooks
        for handle in self._handles:
            handle.remove()
        self._first_batch.stop()

    # In the forward pass

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._differentiating and not within_transform():
            self._forwards += 1
            for name, module in self._mixing:
                check_mixing(name, module)

    def _after_unknown(self, layer: Layer) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if self._differentiating or within_transform() or not any(leaf.requires_grad for leaf in outputs):
                return
            check_whole(layer.name, module)
            if opens(module):
                called_with(*args, **kwargs)  # refuses what it cannot serve
            # The caller may refill a buffer of its own before the pass is over. A shared tensor is copied once.
            copies: dict[int, Tensor] = {}
            args, kwargs = tree_map_only(
                Tensor,
                lambda leaf: copies.setdefault(id(leaf), leaf.clone()) if is_from_outside(leaf) else leaf,
                (args, kwargs),
            )
            count = len(outputs)  # the hook must not hold on to the outputs, which hold on to it
            deferred = _Deferred(layer, args, kwargs, [None] * count, _versions(args, kwargs))

            def on_grad(grad: Tensor, place: int) -> None:
                if current_pass() != self._task:
                    self._begin()
                if not self._is_batch:
                    return
                if deferred.counted:
                    raise counted_twice()
                if not any(known is deferred for known in self._deferred):  # gradients of another pass do not count
                    deferred.grads = [None] * count
                    self._deferred.append(deferred)
                deferred.grads[place] = grad
                deferred.spent = not self._graph_stays

            for place, leaf in enumerate(outputs):
                if leaf.requires_grad:
                    leaf.register_hook(partial(on_grad, place=place))

        return after

    def _after_known(self, layer: Layer) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:  # noqa: ARG001
            if self._differentiating or not output.requires_grad or within_transform():
                return
            call = _Call(layer, args[0] if args else next(iter(kwargs.values())), output.shape)
            sink = self._sink_behind(output) if layer is self._first else None

            def on_grad(grad: Tensor) -> None:
                if current_pass() != self._task:
                    self._first = layer
                    self._begin(sink)
                if self._is_batch:
                    self._used.append(call)
                    with aside(grad.device):
                        self._take(call, grad)

            # An operation in place gives a view another history, and the hook would never be called.
            base = output._base if output._is_view() else None
            register(output if base is None or base.numel() != output.numel() else base, on_grad)

        return after

    def _sink_behind(self, output: Tensor) -> Any:
        """The node that leaves a gradient in a parameter of the layer with this output, if it is easily found."""
        nodes: Any = () if output.grad_fn is None else output.grad_fn.next_functions
        return next((node for node, _ in nodes if id(getattr(node, "variable", None)) in self._own), None)

    # In the backward pass

    def _begin(self, sink: Any = None) -> None:
        """A pass has begun; `sink` is the node of a parameter that it may go on to."""
        # If a pass before broke off, what it left is not to be mixed with what comes.
        self._deferred.clear()
        self._used.clear()
        self._rows.drop()
        if self._first_batch.under_way:
            self._first_batch.begin()
        self._task = current_pass()
        self._is_batch = not self._detached and self._leaves_gradients(sink)
        self._num = self._ordering._examples_due()
        self._graph_stays = graph_is_kept()
        if self._is_batch:  # otherwise somebody asks for gradients of something else, with torch.autograd.grad
            at_end_of_pass(self._on_end_of_backward)

    def _leaves_gradients(self, sink: Any) -> bool:
        """Whether the pass under way leaves one in a parameter: the sink's, the last one that got one, or any."""
        if sink is not None and gets_gradient(sink.variable, sink):
            return True
        found = next((p for p in (self._sink, *self._trainable) if gets_gradient(p)), None)
        self._sink = self._sink if found is None else found
        return found is not None

    def _take(self, call: _Call, grad: Tensor) -> None:
        """Make rows of what a known layer saw."""
        layer, x, grad = call.layer, call.input(), grad.reshape(call.shape)
        handler = handler_of(layer.module)
        assert handler is not None
        if len(grad) != self._num:
            check_count(layer, [grad], self._num)
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        x = x.detach().to(grad.dtype) if x.is_floating_point() else x.detach()
        self._add(layer, handler(layer.module, x, grad, self._num))

    def _add(self, layer: Layer, factors: LayerFactors) -> None:
        # The mean over fewer examples gives each of them more weight.
        share = self._num / self._ordering.batch_size if self._mean else 1.0
        for key, of_parameter in factors.items():
            if not _is_trained(layer.module, key):
                continue
            name = self._names.of(layer, key)
            if self._first_batch.under_way:
                self._first_batch.add(name, of_parameter)
            self._rows.add(name, of_parameter if share == 1 else of_parameter.scaled(share))

    def _on_end_of_backward(self) -> None:
        self._task = None
        self._backwards += 1
        if 0 < self._forwards < self._backwards:
            self._backwards = self._forwards
            raise counted_twice()
        with aside(self._trainable[0].device):
            self._run_deferred()
            if self._first_batch.under_way:
                self._first_batch.finish()
            for call in self._used:
                call.finish(self._graph_stays)
            self._used = []
            self.observe(self._rows.finish())

    def _run_deferred(self) -> None:
        """Layers that are not known run again, and are differentiated."""
        deferred, self._deferred = self._deferred, []
        self._differentiating = True  # they are not to be watched meanwhile
        try:
            for call in deferred:
                if not call.is_unchanged():
                    raise changed_in_place(call.layer)
                check_count(call.layer, call.grads, self._num)
                module = call.layer.module
                found = differentiated(module, call.args, call.kwargs, call.grads, self._num, self._opened)
                self._add(call.layer, found)
                call.counted = True
                if call.spent:
                    call.args, call.kwargs = (), {}
        finally:
            self._differentiating = False


def is_from_outside(x: Tensor) -> bool:
    """Whether the caller holds it, or the tensor it is a view of: a reused buffer, a trained parameter."""
    return x.is_leaf or (x._is_view() and x._base is not None and x._base.is_leaf)


def _is_trained(module: nn.Module, key: str) -> bool:
    parameter = getattr(module, key, None) if "." not in key else module.get_parameter(key)
    return parameter is not None and parameter.requires_grad

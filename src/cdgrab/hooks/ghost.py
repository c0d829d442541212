"""Single examples from an ordinary training loop: hooks on the layers of a model, read at the end of `backward()`.

Every layer's input is noted in the forward pass, its output gradient in the backward pass; together they are the
gradients of all examples (`cdgrab.ghost`). What the loop does with the loss does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cdgrab.ghost.layers import MIXES_EXAMPLES, differentiated, handler_of
from cdgrab.ghost.passes import Called, Pass, is_from_outside
from cdgrab.ghost.plan import (
    Layer,
    changed_in_place,
    check_count,
    check_mixing,
    check_whole,
    counted_twice,
    find_layers,
)
from cdgrab.ghost.recurrent import Opened, called_with, opens
from cdgrab.ghost.sketch import Sketcher
from cdgrab.hooks.convolution import Given, StandIn, given_in
from cdgrab.hooks.engine import (
    aside,
    at_end_of_pass,
    current_pass,
    gets_gradient,
    graph_is_kept,
    place_of,
    register,
    within_transform,
)
from cdgrab.hooks.held import HeldRows
from cdgrab.hooks.later import PutOff
from cdgrab.hooks.recorder import Recorder
from cdgrab.hooks.replayed import Replays

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering

Consumer = Callable[[Pass, dict[str, torch.Size]], None]


@dataclass
class _Call:
    """One use of a layer that must be differentiated once more; the gradients of its outputs come one by one."""

    layer: Layer
    args: Any
    kwargs: Any
    grads: list[Tensor | None]
    versions: list[int]  # of what it was called with
    spent: bool = False  # whether there can be no other backward pass
    counted: bool = False  # whether it was part of a batch

    def is_unchanged(self) -> bool:
        return self.versions == _versions(self.args, self.kwargs)


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


class ExampleAttachment:
    """Gathers the records of a backward pass and hands them over.

    Args:
        ordering: Knows how many examples a batch has.
        model: With layers to watch.
        consume: Takes the records of a batch and the shapes of the parameters; may be replaced.
        mean: Whether the loss is the mean over the batch. Then gradients of a short batch are scaled down, so that
            they weigh as much as all others.
        keeps: Whether `consume` holds on to what it was given.
        sketcher: What `consume` makes rows with, if it does; a part of the state.
        held: Where `consume` leaves rows that are observed later, if it does.
    """

    def __init__(
        self,
        ordering: Ordering,
        model: nn.Module,
        consume: Consumer,
        *,
        mean: bool,
        keeps: bool = True,
        sketcher: Sketcher | None = None,
        held: HeldRows | None = None,
    ) -> None:
        self.sketcher, self.held, self.consume = sketcher, held, consume
        self._ordering = ordering
        layers = find_layers(model)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._recorder = Recorder(ordering, layers, trainable, mean=mean, keeps=keeps, sketcher=sketcher)
        self.replays = Replays(self._recorder.made_parts)
        self._put_off = PutOff(ordering, layers, sketcher, self.replays)
        self._trainable = list(trainable.values())
        self._own = {id(parameter) for parameter in self._trainable}
        self._sink = self._trainable[0]  # one of them that got a gradient in the last batch
        self._first: Layer | None = None  # the layer that a backward pass came by first, the last time
        self._mixing = [(name, m) for name, m in model.named_modules() if isinstance(m, MIXES_EXAMPLES)]
        self._task: int | None = None  # the backward pass that has been queued
        self._num = 0  # of its examples
        self._is_batch = False  # whether it leaves gradients in parameters
        self._graph_stays = True  # for another pass
        self._used: list[Called] = []  # by it
        self._given: list[Given] = []  # what it may take
        self._calls: list[_Call] = []
        self._opened: dict[nn.Module, Opened] = {}
        self._differentiating = self._detached = False
        self._forwards = self._backwards = 0  # passes through the whole model, and those that were batches
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for layer in layers:
            self._watch(layer)

    def settle(self) -> None:
        if self.held is not None:
            self.held.observe()

    def detach(self) -> None:
        self._detached = True  # outputs that are there still have their hooks
        for handle in self._handles:
            handle.remove()
        self._recorder.first_batch.stop()
        self.replays.forget()

    # In the forward pass

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._differentiating and not within_transform():
            self._forwards += 1
            for name, module in self._mixing:
                check_mixing(name, module)

    def _watch(self, layer: Layer) -> None:
        known = handler_of(layer.module) is not None
        after = self._after_known if known else self._after_unknown
        if known and StandIn.serves(layer.module):
            self._handles.append(StandIn(layer.module))
        self._handles.append(layer.module.register_forward_hook(after(layer), with_kwargs=True))

    def _after_unknown(self, layer: Layer) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if self._differentiating or within_transform() or not any(leaf.requires_grad for leaf in outputs):
                return
            check_whole(layer.name, module)
            if opens(module):
                called_with(*args, **kwargs)  # refuses what it cannot serve
            count = len(outputs)  # the hook must not hold on to the outputs, which hold on to it
            # What comes from outside may be a buffer that is filled again before the pass, or the pair, is complete.
            copies: dict[int, Tensor] = {}
            args, kwargs = tree_map_only(
                Tensor,
                lambda leaf: copies.setdefault(id(leaf), leaf.clone()) if is_from_outside(leaf) else leaf,
                (args, kwargs),
            )
            call = _Call(layer, args, kwargs, [None] * count, _versions(args, kwargs))

            def on_grad(grad: Tensor, place: int) -> None:
                if current_pass() != self._task:
                    self._begin(grad)
                if not self._is_batch:
                    return
                if call.counted:
                    raise counted_twice()
                if not any(known is call for known in self._calls):  # of another pass, they count no more
                    call.grads = [None] * count
                    self._calls.append(call)
                call.grads[place] = grad
                call.spent = not self._graph_stays

            for place, leaf in enumerate(outputs):
                if leaf.requires_grad:
                    leaf.register_hook(partial(on_grad, place=place))

        return after

    def _after_known(self, layer: Layer) -> Callable[..., None]:
        convolves, later = isinstance(layer.module, (nn.Conv1d, nn.Conv2d)), self._put_off

        def after(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:  # noqa: ARG001
            if self._differentiating or not output.requires_grad or within_transform():
                return
            called = Called(layer, args[0] if args else next(iter(kwargs.values())), output.shape)
            given = given_in(output) if convolves else None
            sink = self._sink_behind(output) if layer is self._first else None

            def on_grad(grad: Tensor) -> None:
                if current_pass() != self._task:
                    self._first = layer
                    self._begin(grad, sink)
                if later.place is not None and later.place == place_of(grad):
                    later.note(called, grad)
                elif self._is_batch:
                    self._used.append(called)
                    self._recorder.take_now(called, grad, given)
                    if given is not None:
                        self._given.append(given)

            # An operation in place gives a view another history, and the hook would never be called.
            base = output._base if output._is_view() else None
            register(output if base is None or base.numel() != output.numel() else base, on_grad)

        return after

    def _sink_behind(self, output: Tensor) -> Any:
        """The node that leaves a gradient in a parameter of the layer with this output, if it is easily found."""
        nodes: Any = () if output.grad_fn is None else output.grad_fn.next_functions
        return next((node for node, _ in nodes if id(getattr(node, "variable", None)) in self._own), None)

    # In the backward pass

    def _begin(self, grad: Tensor, sink: Any = None) -> None:
        """A pass, with the gradient that came first, and the node of a parameter that it may go on to."""
        # If a pass before broke off, what it left is not to be mixed with what comes.
        broken_off = self._task is not None
        self._calls.clear()
        self._used.clear()
        self._take_back()
        self._task = current_pass()
        self._is_batch = not self._detached and self._leaves_gradients(sink)
        self._num = self._ordering._examples_due()
        self._graph_stays = graph_is_kept()
        self._recorder.begin(self._num)
        possible = self._is_batch and not self._recorder.first_batch.under_way
        self._put_off.begin(grad, self._num, possible=possible, broken_off=broken_off)
        if self._is_batch:  # otherwise somebody asks for gradients of something else, with torch.autograd.grad
            at_end_of_pass(self._on_end_of_backward)

    def _leaves_gradients(self, sink: Any) -> bool:
        """Whether the pass under way does, in a parameter: in that of a node, the one that got one before, or any."""
        if sink is not None and gets_gradient(sink.variable, sink):
            return True
        found = next((p for p in (self._sink, *self._trainable) if gets_gradient(p)), None)
        self._sink = self._sink if found is None else found
        return found is not None

    def _on_end_of_backward(self) -> None:
        self._task = None
        calls, self._calls = self._calls, []
        taken = self._recorder.finished()
        self._backwards += 1
        if 0 < self._forwards < self._backwards:
            self._backwards = self._forwards
            raise counted_twice()
        with aside(self._trainable[0].device):
            kept, put_off = self._put_off.finish()
            if calls:
                self._differentiate(calls)
                for name, records in self._recorder.finished().items():
                    taken[name] += records
            if self._recorder.first_batch.under_way:
                self._recorder.first_batch.finish()
            turn = Pass({})
            if self.sketcher is not None:
                self.sketcher.take_late(taken, self._ordering._epoch)
            else:
                recorder, trained = self._recorder, self._put_off.trained
                turn = Pass(taken, kept, self._num, trained, recorder.made_records, recorder.looked_at)
            used, self._used = self._used + put_off, []
            for called in used:
                called.finish(self._graph_stays)
            self._take_back()
            self.consume(turn, self._recorder.shapes)

    def _take_back(self) -> None:
        """What was given and has not been taken."""
        for given in self._given:
            given.clear()
        self._given.clear()

    def _differentiate(self, calls: list[_Call]) -> None:
        self._differentiating = True  # layers run again, and are not to be watched
        try:
            for call in calls:
                if not call.is_unchanged():
                    raise changed_in_place(call.layer)
                check_count(call.layer, call.grads, self._num)
                found = differentiated(call.layer.module, call.args, call.kwargs, call.grads, self._num, self._opened)
                self._recorder.keep_differentiated(call.layer, found)
                call.counted = True
                if call.spent:
                    call.args, call.kwargs = (), {}
        finally:
            self._differentiating = False

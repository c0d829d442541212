"""Single examples from an ordinary training loop: hooks on the layers of a model, read at the end of `backward()`.

Every layer's input is noted in the forward pass, its output gradient in the backward pass; together they are the
gradients of all examples (`cdgrab.ghost`). What the loop does with the loss does not change.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from cdgrab.ghost.convolved import Convolved
from cdgrab.ghost.layers import MIXES_EXAMPLES, Records, differentiated, handler_of
from cdgrab.ghost.passes import Called, Parts, Pass, Seen
from cdgrab.ghost.plan import (
    Layer,
    changed_in_place,
    check_count,
    check_mixing,
    check_sums,
    check_whole,
    counted_twice,
    find_layers,
)
from cdgrab.ghost.records import Record, Rows, Summed, apart
from cdgrab.ghost.recurrent import Opened, called_with, opens
from cdgrab.ghost.sketch import Joined, Sketcher
from cdgrab.hooks.convolution import Given, StandIn, given_in, within_transform
from cdgrab.hooks.held import HeldRows
from cdgrab.hooks.replayed import LEAST_ROOM, Replays, own_parameters, recordable, room_for, trained

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering

# Asked in a backward pass. What hooks hold on to would live as long as the graph, which goes on after the pass if
# somebody keeps the loss, though what it was made for is freed.
_graph_is_kept: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_current_pass: Callable[[], int] = torch._C._current_graph_task_id

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
        self.sketcher = sketcher
        self.held = held
        self._model = model
        self._ordering = ordering
        self.consume = consume
        self._keeps = keeps
        self._mean = mean
        self._layers = find_layers(model)
        # A parameter with several names, as with tied weights, goes by the first of them.
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = {id(parameter): name for name, parameter in trainable.items()}
        self._names = {
            (layer.name, key): names[id(parameter)]
            for layer in self._layers
            for key, parameter in layer.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        self._shapes = {name: parameter.shape for name, parameter in trainable.items()}
        self._trainable = list(trainable.values())
        self._sink = self._trainable[0]  # one of them that got a gradient in the last batch
        self._own = {id(parameter) for parameter in self._trainable}
        self._first: Layer | None = None  # the layer that a backward pass came by first, the last time
        self._mixing = [(name, m) for name, m in model.named_modules() if isinstance(m, MIXES_EXAMPLES)]
        self._task: int | None = None  # the backward pass that has been queued
        self._num = 0  # of its examples
        self._is_batch = False  # whether it leaves gradients in parameters
        self._graph_stays = True  # for another pass
        self._differentiating = self._detached = False
        self._forwards = self._backwards = 0  # passes through the whole model, and those that were batches
        self._expected: dict[str, Tensor] | None = {}  # gradients of the first pass, to hold the records against
        self._found: dict[str, Tensor] = {}  # what the records say they are
        self._records: dict[str, list[Record]] = defaultdict(list)
        self._calls: list[_Call] = []
        self._opened: dict[nn.Module, Opened] = {}
        self.replays = Replays(self._made)
        # Layers of the pass under way that are to be looked at together, and the versions of their gradients.
        self._noted: list[tuple[Called, Tensor, int]] = []
        self._place: tuple[int, int] | None = None  # device and stream of layers that are put off; None: none are
        self._kept: list[Seen] = []  # that were, and where they stay until they are looked at
        self._bytes = 0  # of what is noted, if it is counted
        self._room = 0  # bytes, after which they are looked at
        self._counted = True  # whether there might be too many
        self._light: torch.Size | None = None  # of the first gradient of a pass that would not have had to be counted
        self._looked_at = 0  # bytes of all other layers
        # Parameters of layers, which of them are trained in such a pass, and were in one that is made up for.
        self._keys = [(layer.name, key) for layer in self._layers for key in own_parameters(layer.module)]
        self._trained: tuple[bool, ...] = ()
        self._trained_then: set[tuple[str, str]] | None = None
        self._used: list[Called] = []  # by the pass under way
        self._given: list[Given] = []  # what it may take
        self._first_handles: list[tuple[Tensor, Any]] = []  # needed until the first pass has been checked
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for layer in self._layers:
            self._watch(layer)
        for name, parameter in trainable.items():
            self._first_handles.append((parameter, parameter.register_hook(partial(self._on_parameter, name))))

    def settle(self) -> None:
        if self.held is not None:
            self.held.observe()

    def detach(self) -> None:
        self._detached = True  # outputs that are there still have their hooks
        for handle in self._handles:
            handle.remove()
        self._stop_checking()
        self.replays.forget()

    def _stop_checking(self) -> None:
        for parameter, handle in self._first_handles:
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # an empty dict would be looked into after every backward pass
        self._first_handles = []

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._differentiating and not within_transform():
            self._forwards += 1
            for name, module in self._mixing:
                check_mixing(name, module)

    def _on_parameter(self, name: str, grad: Tensor) -> None:
        if self._expected is not None:
            self._expected[name] = grad.detach().clone()

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
                lambda leaf: leaf if leaf.requires_grad else copies.setdefault(id(leaf), leaf.clone()),
                (args, kwargs),
            )
            call = _Call(layer, args, kwargs, [None] * count, _versions(args, kwargs))

            def on_grad(grad: Tensor, place: int) -> None:
                if _current_pass() != self._task:
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
        convolves = isinstance(layer.module, (nn.Conv1d, nn.Conv2d))

        def after(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:  # noqa: ARG001
            if self._differentiating or not output.requires_grad or within_transform():
                return
            called = Called(layer, args[0] if args else next(iter(kwargs.values())), output.shape)
            given = given_in(output) if convolves else None
            sink = self._sink_behind(output) if layer is self._first else None

            def on_grad(grad: Tensor) -> None:
                # All steps of a small model wait for this: what can be done once, for all layers, is done later.
                if _current_pass() != self._task:
                    self._first = layer
                    self._begin(grad, sink)
                if self._place is not None and self._place == _place_of(grad):
                    self._noted.append((called, grad, grad._version))
                    if self._counted:
                        self._make_room()
                elif self._is_batch:
                    self._take_now(called, grad, given)

            # An operation in place gives a view another history, and the hook would never be called.
            base = output._base if output._is_view() else None
            _register(output if base is None or base.numel() != output.numel() else base, on_grad)

        return after

    def _begin(self, grad: Tensor, sink: Any = None) -> None:
        """A pass, with the gradient that came first, and the node of a parameter that it may go on to."""
        # If a pass before broke off, what it left is not to be mixed with what comes.
        broken_off = self._task is not None
        self._records.clear()
        self._calls.clear()
        self._drop()
        self._used.clear()
        self._take_back()
        if self._expected is not None:
            self._expected.clear()
            self._found.clear()
        self._task = _current_pass()
        self._is_batch = not self._detached and (_goes_by(sink) or self._leaves_gradients())
        self._num = self._ordering._examples_due()
        self._graph_stays = _graph_is_kept()
        self._place = _place_of(grad) if self._is_batch and self._puts_off(grad) else None
        if self._place is not None:
            self._trained = trained(layer.module for layer in self._layers)
            self.replays.begin(self._trained)
            # Passes that begin alike are taken to be of one size, unless the last one never came to its end.
            self._counted, self._light = broken_off or self._light != grad.shape, grad.shape
        if self._is_batch:  # otherwise somebody asks for gradients of something else, with torch.autograd.grad
            Variable._execution_engine.queue_callback(self._on_end_of_backward)

    def _sink_behind(self, output: Tensor) -> Any:
        """The node that leaves a gradient in a parameter of the layer with this output, if it is easily found."""
        nodes: Any = () if output.grad_fn is None else output.grad_fn.next_functions
        return next((node for node, _ in nodes if id(getattr(node, "variable", None)) in self._own), None)

    def _leaves_gradients(self) -> bool:
        """Whether the pass under way does, in a parameter: in the one that got one before, or else in any."""
        found = next((p for p in (self._sink, *self._trainable) if _gets_gradient(p)), None)
        self._sink = self._sink if found is None else found
        return found is not None

    def _puts_off(self, grad: Tensor) -> bool:
        """Whether layers of a pass are looked at together, to be replayed."""
        if self._expected is not None or not recordable(grad):
            return False
        if self.sketcher is None:
            self._room = LEAST_ROOM  # for copies that are made at once
            return self._ordering._looks_later
        if not self.replays.possible or not self.sketcher.settled(self._ordering._epoch):
            return False
        self._room = self._room or room_for(grad)
        return True

    def _make_room(self) -> None:
        """Look at what has been put off, once it is much."""
        called, grad, _ = self._noted[-1]
        self._bytes += called.seen(grad).nbytes
        if self._bytes > self._room:
            self._light = None
            with torch.no_grad(), _full_precision(grad.device):
                if self.sketcher is None:
                    self._keep_seen()
                else:
                    self._look()

    def _keep_seen(self) -> None:
        """Copy what has been put off."""
        self._kept += self._ordering._keep_seen(self._all_seen(), len(self._kept))

    def _all_seen(self) -> list[Seen]:
        """What has been put off, and is not any longer."""
        noted, self._noted, self._bytes = self._noted, [], 0
        seen = []
        for called, grad, version in noted:
            if grad._version != version:
                raise changed_in_place(called.layer)
            seen.append(called.seen(grad))
        self._used += [called for called, _, _ in noted]
        return seen

    def _look(self) -> None:
        """At what has been put off."""
        assert self.sketcher is not None
        seen = self._all_seen()
        nbytes = sum(one.nbytes for one in seen)
        self.sketcher.add_piece(self.replays(seen, nbytes, self._num, self.sketcher.version))

    def _take_now(self, called: Called, grad: Tensor, given: Given | None) -> None:
        """The records of a known layer, before the pass goes on; it is given what they say its own gradients are."""
        seen = called.seen(grad)
        self._used.append(called)
        self._looked_at += seen.nbytes
        sums: dict[str, Tensor] | None = None if given is None else {}
        with torch.no_grad():
            # An input from outside may be a buffer that is filled again.
            self._take(seen, self._num, sums=sums, own=self._keeps and not seen.x.requires_grad)
        if given is not None and sums is not None:
            given.leave(grad, sums, None if self._expected is None else partial(self._hold_against, called.layer))
            self._given.append(given)

    def _made(self, seen: list[Seen]) -> Joined:
        """What the layers of a pass that were put off add to rows."""
        assert self.sketcher is not None
        parts: dict[str, Tensor] = {}
        for one in seen:
            self._take(one, self._num, parts)
        return self.sketcher.joined(parts)

    def _made_records(self, seen: list[Seen], num: int, trained: tuple[bool, ...]) -> Parts:
        """Records of layers that were put off, perhaps in another pass, in which other parameters were trained."""
        under_way, self._records = self._records, defaultdict(list)
        self._trained_then = {key for key, was in zip(self._keys, trained, strict=True) if was}
        try:
            with torch.no_grad():
                for one in seen:
                    self._take(one, num)
            return self._records
        finally:
            self._records, self._trained_then = under_way, None

    def _take(
        self,
        seen: Seen,
        num: int,
        parts: dict[str, Tensor] | None = None,
        sums: dict[str, Tensor] | None = None,
        own: bool = False,
    ) -> None:
        """The records of a known layer, as `_keep` does; with `own`, what is kept of its input are copies."""
        handler, grad = handler_of(seen.layer.module), seen.grad.reshape(seen.shape)
        assert handler is not None
        check_count(seen.layer, [grad], num)
        wide = torch.promote_types(grad.dtype, torch.float32)
        inputs = seen.x.detach()
        inputs = inputs.to(wide) if inputs.is_floating_point() else inputs
        with _full_precision(grad.device):
            records = handler(seen.layer.module, inputs, grad.to(wide), num)
            self._keep(seen.layer, records, num, parts, sums, inputs if own else None)

    def _drop(self) -> None:
        self._noted, self._kept, self._bytes, self._looked_at = [], [], 0, 0
        if self.sketcher is not None:
            self.sketcher.drop()

    def _keep(
        self,
        layer: Layer,
        records: Records,
        num: int,
        parts: dict[str, Tensor] | None = None,
        sums: dict[str, Tensor] | None = None,
        x: Tensor | None = None,
    ) -> None:
        """For the end of the pass; short, if that is what will be wanted.

        Args:
            layer: With trained parameters.
            records: Of all its parameters.
            num: Of examples.
            parts: Where to put what is short; by default to that of the batch.
            sums: If the layer needs them, gradients of its parameters whose rows are written are left here.
            x: What is somebody else's, so that it must be copied if it is kept.
        """
        # The mean over fewer examples gives each of them more weight.
        share = num / self._ordering.batch_size if self._mean else 1.0
        for key, record in records.items():
            if not self._is_trained(layer, key):
                continue
            if (layer.name, key) not in self._names:
                raise ValueError(
                    f"{key!r} of layer {layer.name!r} was frozen when the model was attached and is trained now; call "
                    "detach(), and attach the model again"
                )
            name = self._names[layer.name, key]
            if self._expected is not None:
                self._sum_up(name, record, num)
            if self.sketcher is None or (sums is not None and isinstance(record, Convolved) and record.has_short_rows):
                record = record.compact()
            if sums is not None and isinstance(record, Rows):
                sums[key] = record.rows_ND.sum(0).view(self._shapes[name])
            record = record if share == 1 else record.scaled(share)
            if x is not None:
                record = apart(record, x)
            if self.sketcher is None or not self.sketcher.take(name, record, self._ordering._epoch, parts):
                self._records[name].append(record.compact() if isinstance(record, Summed) else record)

    def _is_trained(self, layer: Layer, key: str) -> bool:
        if self._trained_then is not None:
            return (layer.name, key) in self._trained_then
        parameter = getattr(layer.module, key, None) if "." not in key else layer.module.get_parameter(key)
        return parameter is not None and parameter.requires_grad

    def _sum_up(self, name: str, record: Record, num: int) -> None:
        """What the records of the first pass say that the gradient is."""
        like = record.tensors[-1]
        if name not in self._found:
            self._found[name] = like.new_zeros(self._shapes[name])
        record.add_to(self._found[name], like.new_ones(num))

    def _on_end_of_backward(self) -> None:
        self._task = None
        calls, self._calls = self._calls, []
        taken, self._records = self._records, defaultdict(list)
        expected, found = self._expected, self._found
        self._backwards += 1
        if 0 < self._forwards < self._backwards:
            self._backwards = self._forwards
            raise counted_twice()
        with torch.no_grad(), _full_precision(self._trainable[0].device):
            if self._noted and self.sketcher is not None:
                self._look()
            if calls:
                self._records = taken
                self._differentiate(calls)
                taken, self._records = self._records, defaultdict(list)
            if expected is not None:
                self._check(found, expected)
                self._expected, self._found = None, {}
                self._stop_checking()
            turn = Pass({})
            if self.sketcher is not None:
                self.sketcher.take_late(taken, self._ordering._epoch)
            else:
                self._keep_seen()
                kept, self._kept = self._kept, []
                turn = Pass(taken, kept, self._num, self._trained, self._made_records, self._looked_at)
            used, self._used = self._used, []
            for called in used:
                called.finish(self._graph_stays)
            self._take_back()
            self.consume(turn, self._shapes)

    def _take_back(self) -> None:
        """What was given and has not been taken."""
        for given in self._given:
            given.clear()
        self._given.clear()

    def _hold_against(self, layer: Layer, found: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        """What a layer is given against what it finds itself, in the first pass."""
        names = {key: self._names[layer.name, key] for key in own}
        check_sums({names[key]: found[key] for key in own}, {names[key]: own[key] for key in own})

    def _differentiate(self, calls: list[_Call]) -> None:
        self._differentiating = True  # layers run again, and are not to be watched
        try:
            for call in calls:
                if not call.is_unchanged():
                    raise changed_in_place(call.layer)
                check_count(call.layer, call.grads, self._num)
                found = differentiated(call.layer.module, call.args, call.kwargs, call.grads, self._num, self._opened)
                self._keep(call.layer, found, self._num)
                self._looked_at += sum(tensor.nbytes for record in found.values() for tensor in record.tensors)
                call.counted = True
                if call.spent:
                    call.args, call.kwargs = (), {}
        finally:
            self._differentiating = False

    def _check(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        grads = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in expected.items()}
        check_sums(
            {
                name: found[name]
                if name in found
                else torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
                for name, grad in grads.items()
            },
            grads,
        )


def _register(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """`tensor.register_hook(hook)` without a handle to remove it by, which takes longer to make than all the rest."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        node = tensor.grad_fn
        if node is None:
            tensor.register_hook(hook)
            return
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    hooks[hook] = hook  # those with a handle have numbers


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Whether the pass under way will leave one there."""
    if not parameter.requires_grad:
        return False
    # The node must not be kept: it belongs to the stream it was made on, and the next pass might come on another.
    return _goes_by(get_gradient_edge(parameter).node)


def _goes_by(node: Any) -> bool:
    """Whether the pass under way does, by the node of a parameter."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a parameter that `torch.autograd.grad` is asked for
        return False


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Its device, and the stream that work with it goes to now."""
    device = tensor.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Also where `backward()` was called under autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()

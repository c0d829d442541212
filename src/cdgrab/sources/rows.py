"""Rows of single examples from a backward pass that stops at the layers: parameters get no gradient on the way.

The gradient of a batch is the sum of its examples' rows. A loop that has the rows written down anyway need not find it
a second time, which is a third of a backward pass.

A layer's rows are written as soon as its output gradients are there; on a GPU beside the rest of the backward pass, on
streams of their own, since few layers fill it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.per_example.factors import Factors, Lookup, Rows, Summed, write_rows
from cdgrab.per_example.layers import LayerFactors, differentiated, embedding, handler_of, linear, widened
from cdgrab.per_example.plan import Layer, Miss, changed_in_place, check_count, check_misses, check_whole, find_layers
from cdgrab.per_example.recurrent import Opened, Tap, called_with, factors_of, opens

_STREAMS = 4
# Layers that are written transposed have at least this many times as many outputs as inputs, and this many weights.
_TALL, _LARGE = 16, 1 << 20
_MANY = 1 << 27  # numbers of a parameter's rows that take longer to read than lookups to be added up


@dataclass(eq=False)
class _Use:
    """A layer in a forward pass, with the versions its tensors had then."""

    layer: Layer
    names: dict[str, str]  # of its trainable parameters: in the layer, in the model
    args: Any
    kwargs: Any
    outputs: list[Tensor]  # whose gradients are wanted
    tap: Tap | None = None  # a part of a recurrent layer, whose output are its gates
    versions: list[int] = field(init=False)
    grads: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = [tensor._version for tensor in self.tensors()]
        self.grads = [None] * len(self.outputs)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)] + self.outputs

    @property
    def looks_up(self) -> bool:
        """Whether it gives lookups, whose sum over examples is found without their rows."""
        return handler_of(self.layer.module) is embedding

    def is_complete(self) -> bool:
        """Whether no gradient is still to come."""
        pairs = zip(self.grads, self.outputs, strict=True)
        return all(grad is not None or not output.requires_grad for grad, output in pairs)

    def factors(self, num: int, parts: int, kept: dict[nn.Module, Opened]) -> LayerFactors:
        """For `num` examples, each of `parts` entries. What is `kept` serves later calls."""
        module = self.layer.module
        if self.versions != [tensor._version for tensor in self.tensors()]:
            raise changed_in_place(self.layer)
        some = next((grad for grad in self.grads if grad is not None), None)
        if some is None:
            return {}
        check_count(self.layer, self.grads, num * parts)
        if self.tap is not None:
            return factors_of(module, [self.tap.wide()], [widened(some)], num)
        handler = handler_of(module)
        if handler is None:
            return differentiated(module, self.args, self.kwargs, self.grads, num, kept)
        given = self.args[0] if self.args else next(iter(self.kwargs.values()))
        # As they are: rows are written in any case. But sums, which are kept until the pass ends, are taken.
        found = handler(module, widened(given), widened(some), num)
        return {key: Rows(record.rows()) if isinstance(record, Summed) else record for key, record in found.items()}


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class _Writing:
    """Writes the rows of a batch while its backward pass goes on, and adds them up.

    Args:
        uses: Of the layers, in the forward pass.
        places: Columns of the rows, by parameter.
        sums: Where a parameter's rows are added up, in its shape.
        turned: Parameters that are transposed in rows.
        early: Whether a long sum may be read before lookups are in the rows.
        num: Of examples.
        parts: Of an example.
        kept: For layers that run once more.
        streams: Of a GPU, taken in turn; none on a CPU.
    """

    def __init__(
        self,
        uses: list[_Use],
        places: dict[str, Tensor],
        sums: dict[str, Tensor],
        turned: set[str],
        *,
        early: bool,
        num: int,
        parts: int,
        kept: dict[nn.Module, Opened],
        streams: list[torch.cuda.Stream],
    ) -> None:
        self._uses, self._places, self._sums, self._turned = uses, places, sums, turned
        self._num, self._parts, self._kept = num, parts, kept
        self._streams = cycle(streams) if streams else None
        self._taken_streams: set[torch.cuda.Stream] = set()
        self._latest: dict[str, torch.cuda.Stream | None] = {}  # where a parameter was dealt with last
        self._written: set[str] = set()
        self._to_come = Counter(name for use in uses for name in use.names.values())
        # What must be written before a parameter's sum is read.
        self._before_sum: dict[str, set[tuple[_Use, str]]] = {}
        for use in uses:
            for key, name in use.names.items():
                self._before_sum.setdefault(name, set()).add((use, key))
        for name, parts_of_it in self._before_sum.items():
            others = {(use, key) for use, key in parts_of_it if not use.looks_up}
            if early and others and self._places[name].numel() >= _MANY:
                self._before_sum[name] = others
        self._taken: set[_Use] = set()
        # What is made on one stream and read on another must stay until all of them have been waited for.
        self._factors: list[LayerFactors] = []

    def watch(self) -> list[Any]:
        """Handles of the hooks that must be removed after the pass: they and the outputs hold on to each other."""
        return [
            output.register_hook(partial(self._arrived, use, place))
            for use in self._uses
            for place, output in enumerate(use.outputs)
            if output.requires_grad
        ]

    def finish(self) -> None:
        """What never got all its gradients, or none."""
        for use in self._uses:
            if use not in self._taken:
                self._take(use)
        for stream in self._taken_streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _arrived(self, use: _Use, place: int, grad: Tensor) -> None:
        use.grads[place] = grad
        if use.is_complete():
            self._take(use)

    def _take(self, use: _Use) -> None:
        self._taken.add(use)
        stream = self._beside(None)
        with torch.no_grad(), _on(stream):
            factors = use.factors(self._num, self._parts, self._kept)
            self._factors.append(factors)
            for number, (key, name) in enumerate(use.names.items()):
                other = self._beside(stream) if number else stream
                with _on(other):
                    found = [factors[key]] if key in factors else []
                    self._write(name, found, other)
                    self._add_up(use, key, found)

    def _beside(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
        """The next stream, which goes on from this one, or from that of the pass."""
        if self._streams is None:
            return None
        chosen = next(self._streams)
        self._taken_streams.add(chosen)
        if chosen is not stream:
            chosen.wait_stream(torch.cuda.current_stream() if stream is None else stream)
        return chosen

    def _write(self, name: str, found: list[Factors], stream: torch.cuda.Stream | None) -> None:
        before = self._latest.get(name, stream)
        if stream is not None and before is not None and before is not stream:
            stream.wait_stream(before)
        self._latest[name] = stream
        self._to_come[name] -= 1
        if found or (self._to_come[name] == 0 and name not in self._written):
            write_rows(found, self._places[name], written=name in self._written, turned=name in self._turned)
            self._written.add(name)

    def _add_up(self, use: _Use, key: str, found: list[Factors]) -> None:
        """Read the sum from rows once all but lookups are in them; add lookups that come later.

        A table that is also the last layer of a model has most of its gradient early: its rows, which take long to
        read, are read while the backward pass goes on. Its lookups come at the end.
        """
        name = use.names[key]
        place_ND, total, before = self._places[name], self._sums[name], self._before_sum[name]
        if not before:
            for record in found:
                assert isinstance(record, Lookup)
                total.add_(record.total())
            return
        before.discard((use, key))
        if before:
            return
        if name not in self._written:
            total.zero_()  # and lookups may come
        elif name in self._turned:
            total.T.copy_(torch.sum(place_ND, 0).view_as(total.T))
        else:
            torch.sum(place_ND, 0, out=total.view(-1))


class ExampleRows:
    """Finds the rows of a batch, and its gradient.

    A row has the gradients of all parameters one after the other. Of some it has the transpose (`turned`): those of
    large linear layers with many more outputs than inputs, as the last of a language model, because cuBLAS writes it
    faster. To inner products it makes no difference.

    Args:
        model: Whose layers treat examples one by one, and have them along the first dimension. The first batch runs
            twice, and is held against the gradient that a whole backward pass finds.
        parts: How many entries along that dimension make an example, one after the other.
    """

    def __init__(self, model: nn.Module, parts: int = 1) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = trainable
        self._sizes = [parameter.numel() for parameter in trainable.values()]
        # As wide as factors are.
        self._dtype = reduce(torch.promote_types, (p.dtype for p in trainable.values()), torch.float32)
        self._checked = False
        self._parts = parts
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._kept: dict[nn.Module, Opened] = {}
        self._device = next(iter(trainable.values())).device
        count = _STREAMS if self._device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(self._device) for _ in range(count)]
        self._uses: list[_Use] | None = None  # while a forward pass is watched
        self._stand_ins: dict[nn.Module, _StandIn] = {}  # for the forward pass of recurrent layers
        layers = find_layers(model)
        self.turned = _turned(self._parameters, layers)
        for layer in layers:
            if parts > 1 and isinstance(layer.module, (nn.Conv1d, nn.Conv2d, nn.GroupNorm)):
                raise ValueError(
                    f"layer {layer.name!r} ({type(layer.module).__name__}) takes examples apart one by one; it cannot "
                    f"be told that {parts} entries are one"
                )
            layer.module.register_forward_hook(self._after(layer), with_kwargs=True)
            if opens(layer.module) and next(layer.module.parameters()).dtype in (torch.float32, torch.float64):
                self._stand_ins[layer.module] = _StandIn(layer, self._names_in(layer))

    def __call__(
        self,
        loss: Callable[[], Tensor],
        num: int,
        place_ND: Tensor | None = None,
        sums_D: Tensor | None = None,
    ) -> Tensor:
        """`num x dim`: what every example adds to the gradient of `loss()`, which calls the model once.

        Written into `place_ND`, and their sum into `sums_D`, if these are given.
        """
        expected = None if self._checked else self._whole_gradient(loss)
        value, uses = self._forward(loss)
        if place_ND is None:
            place_ND = torch.empty(num, sum(self._sizes), dtype=self._dtype, device=value.device)
        if sums_D is None:
            sums_D = torch.empty_like(place_ND[0])
        places = dict(zip(self._parameters, place_ND.split(self._sizes, 1), strict=True))
        named = zip(self._parameters.items(), sums_D.split(self._sizes), strict=True)
        sums = {name: part.view(parameter.shape) for (name, parameter), part in named}
        for name in self._parameters.keys() - {name for use in uses for name in use.names.values()}:
            places[name].zero_()
            sums[name].zero_()
        writing = _Writing(
            uses,
            places,
            sums,
            self.turned,
            early=self._checked,  # what is held against a whole pass are the rows
            num=num,
            parts=self._parts,
            kept=self._kept,
            streams=self._streams,
        )
        handles = writing.watch()
        try:
            outputs = [output for use in uses for output in use.outputs if output.requires_grad]
            torch.autograd.grad(value, outputs, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        writing.finish()
        if expected is not None:
            check_misses({name: Miss.of(sums[name], grad) for name, grad in expected.items()})
            self._checked = True
        return place_ND

    def _whole_gradient(self, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Of the batch, found as anybody would; random numbers are the same once more afterwards."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            grads = torch.autograd.grad(loss(), list(self._parameters.values()), allow_unused=True)
        named = zip(self._parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(parameter) if grad is None else grad for (name, parameter), grad in named}

    def _forward(self, loss: Callable[[], Tensor]) -> tuple[Tensor, list[_Use]]:
        uses: list[_Use] = []
        self._uses = uses
        before = {module: vars(module).get("forward") for module in self._stand_ins}
        try:
            for module, stand_in in self._stand_ins.items():
                stand_in.begin(uses)
                module.forward = stand_in
            return loss(), uses
        finally:
            for module, forward in before.items():
                del module.forward
                if forward is not None:
                    module.forward = forward
            self._uses = None

    def _names_in(self, layer: Layer) -> dict[str, str]:
        named = layer.module.named_parameters(remove_duplicate=False)
        return {key: self._names[id(parameter)] for key, parameter in named if parameter.requires_grad}

    def _after(self, layer: Layer) -> Callable[..., None]:
        names = self._names_in(layer)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._uses is None:
                return
            check_whole(layer.name, module)
            if module not in self._stand_ins:  # which have noted their taps
                outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                self._uses.append(_Use(layer, names, args, kwargs, outputs))

        return after


def _turned(parameters: dict[str, nn.Parameter], layers: list[Layer]) -> set[str]:
    handlers: dict[int, set[Any]] = {}
    for layer in layers:
        for parameter in layer.module.parameters():
            handlers.setdefault(id(parameter), set()).add(handler_of(layer.module))
    return {
        name
        for name, parameter in parameters.items()
        if linear in handlers.get(id(parameter), set()) <= {linear, embedding}
        and parameter.ndim == 2
        and len(parameter) >= _TALL * parameter.shape[1]
        and parameter.numel() >= _LARGE
    }


class _StandIn:
    """Computes what a recurrent layer does, so that the gradients of its gates come with the backward pass."""

    def __init__(self, layer: Layer, names: dict[str, str]) -> None:
        module: Any = layer.module
        self._layer, self._names = layer, names
        self._opened = Opened(module, module.weight_ih_l0)
        self._uses: list[_Use] = []

    def begin(self, uses: list[_Use]) -> None:
        """Before a forward pass, which will add its uses to these."""
        self._uses = uses
        self._opened.copy_weights()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x, state = called_with(*args, **kwargs)
        output, taps = self._opened(x, state)
        for tap in taps:
            names = {key: name for key, name in self._names.items() if key.partition("_l")[2] == tap.suffix[2:]}
            self._uses.append(_Use(self._layer, names, (x,), {}, [tap.gates_MTG], tap))
        return output

"""Rows of single examples from a backward pass that stops at the layers: parameters get no gradient on the way.

The gradient of a batch is the sum of its examples' rows. A loop that has the rows written down anyway need not find it
a second time, which is a third of a backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.ghost.layers import Records, differentiated, handler_of, widened
from cdgrab.ghost.plan import Layer, changed_in_place, check_count, check_sums, find_layers
from cdgrab.ghost.records import Record, write_rows
from cdgrab.ghost.recurrent import Opened, Tap, called_with, opens, records_of


@dataclass
class _Use:
    """A layer in a forward pass, with the versions its tensors had then."""

    layer: Layer
    args: Any
    kwargs: Any
    outputs: list[Tensor]  # whose gradients are wanted
    versions: list[int]
    taps: list[Tap] | None = None  # of a recurrent layer; then the outputs are what these added to its gates

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)] + self.outputs


class ExampleRows:
    """Finds the rows of a batch.

    Args:
        model: Whose layers treat examples one by one, and have them along the first dimension. The first batch is held
            against the gradient that a whole backward pass finds.
        parts: How many entries along that dimension make an example, one after the other.
    """

    def __init__(self, model: nn.Module, parts: int = 1) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = trainable
        self._sizes = [parameter.numel() for parameter in trainable.values()]
        # As wide as records are.
        self._dtype = reduce(torch.promote_types, (p.dtype for p in trainable.values()), torch.float32)
        self._checked = False
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._uses: list[_Use] | None = None  # while a forward pass is watched
        self._parts = parts
        self._stand_ins: dict[nn.Module, Callable[..., Any]] = {}  # for the forward pass of recurrent layers
        for layer in find_layers(model):
            layer.module.register_forward_hook(self._after(layer), with_kwargs=True)
            if opens(layer.module) and next(layer.module.parameters()).dtype in (torch.float32, torch.float64):
                self._stand_ins[layer.module] = self._stand_in(layer)

    def __call__(self, loss: Callable[[], Tensor], num: int, place_ND: Tensor | None = None) -> Tensor:
        """`num x dim`: what every example adds to the gradient of `loss()`, which calls the model once.

        Written into `place_ND`, if there is one.
        """
        self._uses = []
        # The first pass finds parameters' gradients too, which a stand-in does not have.
        stand_ins = self._stand_ins if self._checked else {}
        try:
            for module, stand_in in stand_ins.items():
                module.forward = stand_in
            value = loss()
        finally:
            for module in stand_ins:
                del module.forward
            uses, self._uses = self._uses, None
        outputs = [output for use in uses for output in use.outputs if output.requires_grad]
        parameters = [] if self._checked else self._parameters.values()
        found = torch.autograd.grad(value, [*outputs, *parameters], allow_unused=True)
        grads = iter(found)
        records: dict[str, list[Record]] = defaultdict(list)
        with torch.no_grad():
            for use in uses:
                of_use = [next(grads) if output.requires_grad else None for output in use.outputs]
                for key, record in self._records(use, of_use, num).items():
                    parameter = dict(use.layer.module.named_parameters()).get(key)  # a norm may have no bias
                    if parameter is not None and parameter.requires_grad:
                        records[self._names[id(parameter)]].append(record)
            rows_ND = place_ND
            if rows_ND is None:
                rows_ND = torch.empty(num, sum(self._sizes), dtype=self._dtype, device=value.device)
            for name, place in zip(self._parameters, rows_ND.split(self._sizes, 1), strict=True):
                write_rows(records[name], place)
            if not self._checked:
                self._check(rows_ND, found[len(outputs) :])
        return rows_ND

    def _check(self, rows_ND: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        sums = rows_ND.sum(0).split(self._sizes)
        named = list(zip(self._parameters.items(), sums, grads, strict=True))
        check_sums(
            {name: part.view_as(parameter) for (name, parameter), part, _ in named},
            {name: torch.zeros_like(parameter) if grad is None else grad for (name, parameter), _, grad in named},
        )
        self._checked = True

    def _after(self, layer: Layer) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._uses is None or (self._checked and module in self._stand_ins):  # which has noted its taps
                return
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            use = _Use(layer, args, kwargs, outputs, [])
            use.versions = [tensor._version for tensor in use.tensors()]
            self._uses.append(use)

        return after

    def _stand_in(self, layer: Layer) -> Callable[..., Any]:
        """Computes what a recurrent layer does, so that the gradients of its gates come with the backward pass."""
        module: Any = layer.module
        opened = Opened(module, module.weight_ih_l0)

        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._uses is not None
            output, taps = opened(module, *called_with(*args, **kwargs))
            self._uses.append(_Use(layer, (), {}, [tap.zeros_MTG for tap in taps], [0] * len(taps), taps))
            return output

        return forward

    def _records(self, use: _Use, grads: list[Tensor | None], num: int) -> Records:
        module = use.layer.module
        if use.versions != [tensor._version for tensor in use.tensors()]:
            raise changed_in_place(use.layer)
        some = next((grad for grad in grads if grad is not None), None)
        if some is None:
            return {}
        check_count(use.layer, grads if use.taps is None else [some], num * self._parts)
        if use.taps is not None:
            return records_of(module, use.taps, grads, num)
        handler = handler_of(module)
        if handler is None:
            return differentiated(module, use.args, use.kwargs, grads, num)
        given = use.args[0] if use.args else next(iter(use.kwargs.values()))
        return handler(module, widened(given), widened(some), num)  # as it is: rows are written in any case

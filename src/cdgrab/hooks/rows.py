"""Rows of single examples from a backward pass that stops at the layers: parameters get no gradient on the way.

The gradient of a batch is the sum of its examples' rows. A loop that has the rows written down anyway need not find it
a second time, which is a third of a backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.ghost.layers import Records, differentiated, handler_of, widened
from cdgrab.ghost.plan import Layer, find_layers
from cdgrab.ghost.records import Record, write_rows


@dataclass
class _Use:
    """A layer in a forward pass, with the versions its tensors had then."""

    layer: Layer
    args: Any
    kwargs: Any
    outputs: list[Tensor]
    versions: list[int]

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)] + self.outputs


class ExampleRows:
    """Finds the rows of a batch.

    Args:
        model: Whose layers treat examples one by one, and have them along the first dimension. Parameters that are not
            used through their layer are not seen, and nobody notices: hold the rows against `per_example_grads` first.
    """

    def __init__(self, model: nn.Module) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sizes = {name: parameter.numel() for name, parameter in trainable.items()}
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._uses: list[_Use] | None = None  # while a forward pass is watched
        for layer in find_layers(model):
            layer.module.register_forward_hook(self._after(layer), with_kwargs=True)

    def __call__(self, loss: Callable[[], Tensor], num: int) -> Tensor:
        """`num x dim`: what every example adds to the gradient of `loss()`, which calls the model once."""
        self._uses = []
        try:
            value = loss()
        finally:
            uses, self._uses = self._uses, None
        outputs = [output for use in uses for output in use.outputs if output.requires_grad]
        grads = iter(torch.autograd.grad(value, outputs, allow_unused=True))
        parts: dict[str, list[Record]] = defaultdict(list)
        with torch.no_grad():
            for use in uses:
                of_use = [next(grads) if output.requires_grad else None for output in use.outputs]
                for key, record in _records(use, of_use, num).items():
                    parameter = use.layer.module.get_parameter(key)
                    if parameter.requires_grad:
                        parts[self._names[id(parameter)]].append(record)
            rows_ND = value.new_empty(num, sum(self._sizes.values()))
            for name, place in zip(self._sizes, rows_ND.split(list(self._sizes.values()), 1), strict=True):
                write_rows(parts[name], place)
        return rows_ND

    def _after(self, layer: Layer) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
            if self._uses is None:
                return
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            use = _Use(layer, args, kwargs, outputs, [])
            use.versions = [tensor._version for tensor in use.tensors()]
            self._uses.append(use)

        return after


def _records(use: _Use, grads: list[Tensor | None], num: int) -> Records:
    module = use.layer.module
    if use.versions != [tensor._version for tensor in use.tensors()]:
        raise ValueError(
            f"what layer {use.layer.name!r} ({type(module).__name__}) took or gave was changed in place, so that its "
            "gradients cannot be told apart; use an operation that is not in place"
        )
    if all(grad is None for grad in grads):
        return {}
    handler = handler_of(module)
    if handler is None:
        return differentiated(module, use.args, use.kwargs, grads, num)
    given = use.args[0] if use.args else next(iter(use.kwargs.values()))
    assert grads[0] is not None
    return handler(module, widened(given), widened(grads[0]), num)

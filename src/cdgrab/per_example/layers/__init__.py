"""Layers: one file per family, which finds the factors of its parameters.

`base.py` says what an adapter may declare. Linear layers, embeddings, convolutions and norms need only their input and
output gradient. Recurrent layers and attention run again for all examples together, any other layer (`unknown.py`)
example by example. A family's file also says which of its parameters are matrices, which modules it does not take, and
what it refuses. `register_layer` adds layers from outside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from cdgrab.per_example.layers.attention import AttentionAdapter
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors
from cdgrab.per_example.layers.convolution import ConvolutionAdapter
from cdgrab.per_example.layers.embedding import EmbeddingAdapter
from cdgrab.per_example.layers.linear import LinearAdapter, TransposedLinearAdapter
from cdgrab.per_example.layers.norms import (
    BatchNormAdapter,
    GroupNormAdapter,
    LayerNormAdapter,
    OtherBatchNorm,
    RmsNormAdapter,
)
from cdgrab.per_example.layers.recurrent import RecurrentAdapter
from cdgrab.per_example.layers.unknown import OneByOne

FactorFunction = Callable[[Any, Tensor, Tensor, int], LayerFactors]
Registered = TypeVar("Registered", bound="type[LayerAdapter] | FactorFunction")

_ANY = OneByOne()
_ADAPTERS: dict[type[nn.Module], LayerAdapter] = {
    nn.Linear: LinearAdapter(),
    nn.Embedding: EmbeddingAdapter(),
    nn.LayerNorm: LayerNormAdapter(),
    nn.RMSNorm: LayerNormAdapter(),
    nn.GroupNorm: GroupNormAdapter(),
    nn.MultiheadAttention: AttentionAdapter(),
    nn.SyncBatchNorm: OtherBatchNorm(),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNormAdapter()),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), ConvolutionAdapter()),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN, nn.RNNBase), RecurrentAdapter()),
}
# Layers of the transformers package, which is not imported to find out: by how the name of their class ends.
_OF_TRANSFORMERS = {
    "pytorch_utils.Conv1D": TransposedLinearAdapter(),
    "RMSNorm": RmsNormAdapter(),
    "T5LayerNorm": RmsNormAdapter(),
}


def adapter_of(module: nn.Module) -> LayerAdapter:
    """The adapter for a module. One registered for a class serves its subclasses by its fallback only."""
    own, *others = _classes_of(module)
    for kind in (own, *others):
        adapter = _ADAPTERS.get(kind) or _of_transformers(kind)
        if adapter is not None:
            taken = kind is own and adapter.takes(module)
            return adapter if taken else adapter.fallback or _ANY
    return _ANY


def _classes_of(module: nn.Module) -> list[type]:
    """The class of a module and its bases, without the subclass that `fully_shard` makes of it."""
    kinds = type(module).__mro__
    # By name: asking for the class would import all of it.
    is_sharded = len(kinds) > 1 and kinds[1].__name__ == "FSDPModule"
    return list(kinds[2:] if is_sharded else kinds)


def _of_transformers(kind: type) -> LayerAdapter | None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not name.startswith("transformers."):
        return None
    return next((adapter for end, adapter in _OF_TRANSFORMERS.items() if name.endswith(end)), None)


def register_layer(*kinds: type[nn.Module]) -> Callable[[Registered], Registered]:
    """Register a function that finds the gradients of single examples for layers of your own; a decorator.

    The function takes the module, its input, its output gradient and the number of examples. It returns the factors of
    the layer's parameters by name (`cdgrab.factors`). The output gradient is that of the loss given to `backward()`.
    Layers with several inputs or outputs, refusals or a matrix need a subclass of `LayerAdapter` instead. Models
    attached later use it. A layer that is not registered runs again, example by example.

    Args:
        kinds: Classes of layers, without their subclasses. An earlier registration is replaced.

    Example:
        >>> import torch, cdgrab
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(6))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> @cdgrab.register_layer(Scale)
        ... def scale(module, x, grad, num):
        ...     return {"weight": cdgrab.factors.Summed((grad * x).reshape(num, -1, 6))}
    """
    for kind in kinds or (None,):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ValueError(f"register_layer() was given {kind!r}; expected classes: @register_layer(MyLayer)")

    def register(adapter: Registered) -> Registered:
        made = _adapter_from(adapter)
        _ADAPTERS.update(dict.fromkeys(kinds, made))
        return adapter

    return register


class _FromFunction(LayerAdapter):
    def __init__(self, function: FactorFunction) -> None:
        self._function = function

    def factors(self, module: nn.Module, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        return self._function(module, x, grad, num)


def _adapter_from(found: Any) -> LayerAdapter:
    if isinstance(found, type) and issubclass(found, LayerAdapter):
        return found()
    try:
        inspect.signature(found).bind(None, None, None, None)
    except TypeError as error:
        raise ValueError(
            f"register_layer() decorates {found!r}; expected a function (module, x, grad, num), or a subclass of "
            "cdgrab.LayerAdapter"
        ) from error
    return _FromFunction(found)

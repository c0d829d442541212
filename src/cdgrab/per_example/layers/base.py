"""The base class of adapters. They declare what a kind of layer needs, so that callers do not ask for types."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cdgrab.factors import Factors


class Unseen(ValueError):
    """A layer does not show the gradients of single examples; the message says why. Its parameters are left out."""


LayerFactors = dict[str, Factors]  # by the name of the parameter in the layer
T = TypeVar("T")


class LayerAdapter:
    """Finds the factors of one kind of layer. Subclasses override `factors` or `factors_again`, and what differs.

    Attributes:
        runs_again: Whether the layer runs again at the end of the backward pass (`factors_again`). Otherwise its
            factors follow from its first input and the gradient of its one output (`factors`).
        is_whole: Whether modules inside do not run as modules, so that only the calls of the whole are captured.
        takes_flattened: Whether the first of two dimensions of an output may hold several positions of an example.
        channels_first: Whether outputs have their channels in the second dimension, not in the last.
        parameters: Names of the parameters it serves; None for any.
        fallback: Serves subclasses of the layer, and modules that this adapter does not take. None for the adapter that
            serves any layer.
    """

    runs_again = is_whole = takes_flattened = channels_first = False
    parameters: ClassVar[Collection[str] | None] = None
    fallback: ClassVar[LayerAdapter | None] = None

    def takes(self, module: Any) -> bool:
        """Whether it serves a module with this configuration. Weight normalisation, say, adds other parameters."""
        return self.parameters is None or {name for name, _ in module.named_parameters()} <= set(self.parameters)

    def check(self, name: str, module: Any) -> None:
        """Raise `ValueError`, with the remedy, for a module that cannot be served: its parameters are left out."""

    def check_call(self, args: Any, kwargs: Any) -> None:
        """Raise `ValueError`, with the remedy, for arguments that cannot be served: its parameters are left out."""

    def matrices(self, module: Any) -> Collection[str]:  # noqa: ARG002
        """The names of the parameters whose gradients come as factors of a matrix, not as rows."""
        return ()

    def example_dim(self, output: int) -> int:  # noqa: ARG002
        """The dimension of the examples in output number `output`."""
        return 0

    def factors(self, module: Any, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        """The factors for `num` examples, from the input and the output gradient, both at least in single precision."""
        raise NotImplementedError(f"{type(self).__name__} has no factors()")

    def factors_again(self, module: Any, args: Any, kwargs: Any, grads: list[Tensor | None], num: int) -> LayerFactors:
        """The factors for `num` examples, from a second run of the module.

        Args:
            module: The layer.
            args: The positional arguments of its call.
            kwargs: The keyword arguments of its call.
            grads: The gradients of its outputs, at least in single precision; None for those that got none.
            num: The number of examples.
        """
        raise NotImplementedError(f"{type(self).__name__} has no factors_again()")


def widened(tree: T) -> T:
    """The tree, with tensors detached and at least in single precision; autocast leaves less."""
    wide: T = tree_map_only(Tensor, _widened, tree)
    return wide


def _widened(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.to(torch.promote_types(found.dtype, torch.float32)) if found.is_floating_point() else found


def weights_of(module: nn.Module) -> list[str]:
    """The names of the parameters with two dimensions or more."""
    return [name for name, parameter in module.named_parameters() if parameter.ndim > 1]


def check_repeatable(name: str, module: Any) -> None:
    """Raise `ValueError` for dropout inside, and for examples that do not come first."""
    if not module.batch_first:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) has batch_first=False; make it with batch_first=True"
        )
    if module.dropout and module.training:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) has dropout inside, which would draw other numbers when the "
            "layer runs again; make it with dropout=0 and put a Dropout layer beside it"
        )

"""What an adapter declares about a kind of layer, so that nobody else asks for types."""

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
    """Finds the factors of one kind of layer. Subclasses override `factors`, or `factors_again`, and what differs.

    Attributes:
        runs_again: Whether the layer runs once more at the end of the backward pass (`factors_again`). Otherwise its
            factors follow from its first input and the gradient of its one output (`factors`).
        is_whole: Whether modules inside do not run as modules, so that only the whole can be watched.
        takes_flattened: Whether outputs of two dimensions may have several positions of an example in the first.
        channels_first: Whether outputs have their channels in the second dimension, not in the last.
        parameters: Names of the parameters it knows; None if their names do not matter.
        fallback: Serves subclasses of the layer, and what this adapter does not take. None for the adapter that serves
            any layer.
    """

    runs_again = is_whole = takes_flattened = channels_first = False
    parameters: ClassVar[Collection[str] | None] = None
    fallback: ClassVar[LayerAdapter | None] = None

    def takes(self, module: Any) -> bool:
        """Whether a module with this configuration is served. Weight normalisation, say, brings other parameters."""
        return self.parameters is None or {name for name, _ in module.named_parameters()} <= set(self.parameters)

    def check(self, name: str, module: Any) -> None:
        """Raise `ValueError`, with the remedy, for a module that cannot be served: its parameters are left out."""

    def check_call(self, args: Any, kwargs: Any) -> None:
        """Raise `ValueError`, with the remedy, for arguments that cannot be served: its parameters are left out."""

    def matrices(self, module: Any) -> Collection[str]:  # noqa: ARG002
        """Names of the parameters whose gradients come as factors of a matrix, not as rows."""
        return ()

    def example_dim(self, output: int) -> int:  # noqa: ARG002
        """The dimension of the examples in the output with this number."""
        return 0

    def factors(self, module: Any, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        """Factors from the input and the output gradient for `num` examples, both in single precision at least."""
        raise NotImplementedError(f"{type(self).__name__} has no factors()")

    def factors_again(self, module: Any, args: Any, kwargs: Any, grads: list[Tensor | None], num: int) -> LayerFactors:
        """Factors for `num` examples from one more run of the module.

        Args:
            module: The layer.
            args: What it was called with.
            kwargs: The same by name.
            grads: Of its outputs, in single precision at least; None for those that got none.
            num: Of examples.
        """
        raise NotImplementedError(f"{type(self).__name__} has no factors_again()")


def widened(tree: T) -> T:
    """Its tensors without history and in single precision at least: autocast leaves less."""
    wide: T = tree_map_only(Tensor, _widened, tree)
    return wide


def _widened(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.to(torch.promote_types(found.dtype, torch.float32)) if found.is_floating_point() else found


def weights_of(module: nn.Module) -> list[str]:
    """Names of the parameters with two dimensions or more."""
    return [name for name, parameter in module.named_parameters() if parameter.ndim > 1]


def check_repeatable(name: str, module: Any) -> None:
    """Refuse dropout inside, and examples that do not come first."""
    if not module.batch_first:
        raise ValueError(f"layer {name!r} ({type(module).__name__}) must be made with batch_first=True")
    if module.dropout and module.training:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) has dropout inside, which cannot be repeated when it is "
            "differentiated once more; make it with dropout=0 and put a Dropout layer beside it"
        )

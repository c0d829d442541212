"""Calls of layers in a forward pass, kept until the gradients of their outputs come, and what is refused then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cdgrab.per_example.layers.base import LayerFactors, Unseen, widened
from cdgrab.per_example.plan import Layer, check_count


class InputCall:
    """One call of a layer that needs its input and output gradient only. The input must not change in between."""

    __slots__ = ("_counted", "_shape", "_version", "_x", "layer")

    def __init__(self, layer: Layer, x: Tensor, shape: torch.Size) -> None:
        self.layer, self._shape = layer, shape
        self._x: Tensor | None = x
        self._version = x._version
        self._counted = False  # whether it was part of a batch

    def factors(self, grad: Tensor, num: int) -> LayerFactors:
        """Factors for `num` examples, now that the gradient of the output has come."""
        x, grad = self._input(), grad.reshape(self._shape)
        if len(grad) != num:
            check_count(self.layer, [grad], num)
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        x = x.detach().to(grad.dtype) if x.is_floating_point() else x.detach()
        return self.layer.adapter.factors(self.layer.module, x, grad, num)

    @property
    def index(self) -> Tensor | None:
        """The input, if it is one of whole numbers, as that of an embedding."""
        return None if self._x is None or self._x.is_floating_point() else self._x

    def finish(self, graph_stays: bool) -> None:
        """After a batch. Without the graph its input is not needed again, and must not live as long as the output."""
        self._counted = True
        if not graph_stays:
            self._x = None

    def _input(self) -> Tensor:
        if self._x is None:
            raise used_up(self.layer)
        if self._counted:
            raise counted_twice()
        if self._x._version != self._version and _needs_input(self.layer.module):
            raise changed_in_place(self.layer)
        return self._x


@dataclass(eq=False)
class DeferredCall:
    """One call of a layer that runs once more at the end of the pass; gradients of its outputs come one by one."""

    layer: Layer
    args: Any
    kwargs: Any
    num_outputs: int
    grads: list[Tensor | None] = field(default_factory=list)
    used_up: bool = False  # whether there can be no other backward pass
    counted: bool = False  # whether it was part of a batch

    def __post_init__(self) -> None:
        # The caller may refill a buffer of its own before the pass is over.
        self.args, self.kwargs = _copied((self.args, self.kwargs))
        self._versions = self._current_versions()

    def start(self) -> None:
        """The first gradient of a pass has come; those of another pass do not count."""
        if self.counted:
            raise counted_twice()
        self.grads = [None] * self.num_outputs

    def factors(self, num: int) -> LayerFactors:
        """Factors for `num` examples, once the gradients of all outputs have come."""
        if self._versions != self._current_versions():
            raise changed_in_place(self.layer)
        check_count(self.layer, self.grads, num)
        return self.layer.adapter.factors_again(self.layer.module, self.args, self.kwargs, widened(self.grads), num)

    def finish(self) -> None:
        """After a batch."""
        self.counted = True
        if self.used_up:
            self.args, self.kwargs = (), {}

    def _current_versions(self) -> list[int]:
        return [leaf._version for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def _copied(tree: Any) -> Any:
    """With copies of tensors that the caller holds; one that is shared is copied once."""
    copies: dict[int, Tensor] = {}

    def copied(leaf: Tensor) -> Tensor:
        if not _is_from_outside(leaf):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return tree_map_only(Tensor, copied, tree)


def _is_from_outside(x: Tensor) -> bool:
    """Whether the caller holds it, or the tensor it is a view of: a reused buffer, a trained parameter."""
    return x.is_leaf or (x._is_view() and x._base is not None and x._base.is_leaf)


def _needs_input(module: nn.Module) -> bool:
    """Whether more than a bias is trained, whose gradient does not depend on the input."""
    return any(p.requires_grad for name, p in module.named_parameters(recurse=False) if name != "bias")


def not_tensors(layer: Layer, x: object, output: object) -> Unseen:
    """For a layer with another signature than its adapter serves."""
    return Unseen(
        f"{layer} takes a {type(x).__name__} and returns a {type(output).__name__}; an adapter with factors() serves "
        "one tensor in and one out; register one with runs_again = True and factors_again()"
    )


def counted_twice() -> ValueError:
    """For a graph that was kept, or passes that nobody asked for."""
    return ValueError(
        "there was a second backward pass after one forward pass, and a batch is counted for each; add the losses up "
        "and call backward() once; with activation checkpointing use use_reentrant=False"
    )


def used_up(layer: Layer) -> RuntimeError:
    """For a graph that has been freed; PyTorch itself would say so a little later."""
    return RuntimeError(
        f"a backward pass goes through {layer} for the second time, and the first was not called with "
        "retain_graph=True; add the losses up and call backward() once"
    )


def changed_in_place(layer: Layer) -> Unseen:
    """For tensors that are no longer what the layer saw."""
    return Unseen(
        f"what {layer} took or gave was changed in place, so that its gradients cannot be told apart; use an operation "
        "that is not in place"
    )

"""Captured calls of layers: they keep inputs until the output gradients arrive, then return factors, or refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cdgrab.per_example.engine import whole
from cdgrab.per_example.layers.base import LayerFactors, Unseen, widened
from cdgrab.per_example.plan import Layer, check_count


class InputCall:
    """One call of a layer whose factors follow from its input and output gradient. The input must not change before."""

    __slots__ = ("_counted", "_shape", "_version", "_x", "layer")

    def __init__(self, layer: Layer, x: Tensor, shape: torch.Size) -> None:
        self.layer, self._shape = layer, shape
        self._x: Tensor | None = x
        self._version = x._version
        self._counted = False  # whether it was part of a counted batch

    def factors(self, grad: Tensor, num: int) -> LayerFactors:
        """The factors for `num` examples, from the gradient of the output."""
        x, grad = whole(self._input()), grad.reshape(self._shape)
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
        """Mark the call as counted. Without the graph, free its input, which would live as long as the output."""
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
    """One call of a layer that runs again at the end of the backward pass; its output gradients come one by one."""

    layer: Layer
    args: Any
    kwargs: Any
    num_outputs: int
    grads: list[Tensor | None] = field(default_factory=list)
    used_up: bool = False  # whether the graph is freed, so that no other backward pass can follow
    counted: bool = False  # whether it was part of a counted batch

    def __post_init__(self) -> None:
        # The caller may refill a buffer of its own before the pass ends.
        self.args, self.kwargs = _copied((self.args, self.kwargs))
        self._versions = self._current_versions()

    def start(self) -> None:
        """Begin a pass with its first gradient; gradients of an earlier pass are dropped."""
        if self.counted:
            raise counted_twice()
        self.grads = [None] * self.num_outputs

    def factors(self, num: int) -> LayerFactors:
        """The factors for `num` examples, once the gradients of all outputs have come."""
        if self._versions != self._current_versions():
            raise changed_in_place(self.layer)
        check_count(self.layer, self.grads, num)
        return self.layer.adapter.factors_again(self.layer.module, self.args, self.kwargs, widened(self.grads), num)

    def finish(self) -> None:
        """Mark the call as counted; free its arguments if the graph is freed."""
        self.counted = True
        if self.used_up:
            self.args, self.kwargs = (), {}

    def _current_versions(self) -> list[int]:
        return [leaf._version for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def _copied(tree: Any) -> Any:
    """The tree, with tensors that the caller may overwrite copied; a shared one is copied once."""
    copies: dict[int, Tensor] = {}

    def copied(leaf: Tensor) -> Tensor:
        if not _caller_may_overwrite(leaf):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return tree_map_only(Tensor, copied, tree)


def _caller_may_overwrite(x: Tensor) -> bool:
    """Whether the caller may overwrite it: it, or the tensor it is a view of, is a leaf (a buffer, a parameter)."""
    return x.is_leaf or (x._is_view() and x._base is not None and x._base.is_leaf)


def _needs_input(module: nn.Module) -> bool:
    """Whether more than the bias is trained: the gradient of a bias does not depend on the input."""
    return any(p.requires_grad for name, p in module.named_parameters(recurse=False) if name != "bias")


def not_tensors(layer: Layer, x: object, output: object) -> Unseen:
    """The error for a layer whose signature its adapter does not serve."""
    return Unseen(
        f"{layer} takes a {type(x).__name__} and returns a {type(output).__name__}; an adapter with factors() serves "
        "one tensor in and one out; register one with runs_again = True and factors_again()"
    )


def counted_twice() -> ValueError:
    """The error for a batch that would be counted twice."""
    return ValueError(
        "there was a second backward pass after one forward pass, and each would count as a batch; add the losses up "
        "and call backward() once; with activation checkpointing use use_reentrant=False"
    )


def used_up(layer: Layer) -> RuntimeError:
    """The error for a graph that has been freed; PyTorch itself would raise a little later."""
    return RuntimeError(
        f"a backward pass goes through {layer} for the second time, and the first was not called with "
        "retain_graph=True; add the losses up and call backward() once"
    )


def changed_in_place(layer: Layer) -> Unseen:
    """The error for tensors that changed after the layer ran."""
    return Unseen(
        f"an input or output of {layer} was changed in place, so the gradients of its examples are lost; use an "
        "operation that is not in place"
    )

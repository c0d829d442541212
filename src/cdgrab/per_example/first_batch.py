"""The first batch, held against the gradient that `backward()` leaves: what nobody watches cannot be told otherwise.

A weight may be used outside of its layer, where no hook sees it. Then the gradients of single examples do not add up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdgrab.factors import Factors
from cdgrab.per_example.engine import aside


class Miss(NamedTuple):
    """By how much the examples' gradients miss that of the batch, and how long it is."""

    error: float
    length: float

    @classmethod
    def of(cls, found: Tensor, grad: Tensor) -> Miss:
        return cls(float((found - grad).norm()), float(grad.norm()))


class FirstBatch:
    """Compares sums over examples with the gradients of the parameters, until they have been found equal once.

    A layer's factors are there before the gradients of its parameters, so that these are compared as they come, and
    nothing of them is kept.

    Args:
        parameters: That are trained, by name.
        late: Those whose factors come at the end of the pass.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], late: Collection[str]) -> None:
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._late = late
        self._found: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}  # of those that come late
        self._misses: dict[str, Miss] = {}
        self._handles: list[tuple[Tensor, Any]] = [
            (parameter, parameter.register_hook(partial(self._on_gradient, name)))
            for name, parameter in parameters.items()
        ]

    @property
    def under_way(self) -> bool:
        """Whether there is still something to compare."""
        return bool(self._handles)

    def begin(self) -> None:
        """A pass; what one before left, which broke off, does not count."""
        self._found.clear()
        self._gradients.clear()
        self._misses.clear()

    def add(self, name: str, factors: Factors) -> None:
        """Take what a parameter's examples add up to in one use of it."""
        total = factors.total().view(self._shapes[name])
        self._found[name] = self._found[name] + total if name in self._found else total

    def finish(self) -> None:
        """Compare what is left, and be done with it; raises `ValueError` if there is a difference."""
        for name, grad in self._gradients.items():
            self._compare(name, grad)
        for name, found in self._found.items():  # which came after the gradient, and so is no part of it
            if name in self._misses:
                error, length = self._misses[name]
                self._misses[name] = Miss(error + float(found.norm()), length)
        check_misses(self._misses)
        self.stop()

    def stop(self) -> None:
        """Without having compared everything."""
        self.begin()
        for parameter, handle in self._handles:
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # an empty dict would be looked into after every backward pass
        self._handles = []

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        if name in self._late:
            # Only the first is of this pass: a layer that runs again may differentiate itself.
            self._gradients.setdefault(name, grad.detach().clone())
        else:
            with aside(grad.device):
                self._compare(name, grad.detach())

    def _compare(self, name: str, grad: Tensor) -> None:
        grad = grad.to_dense() if grad.is_sparse else grad
        found = self._found.pop(name, None)
        if found is None:
            found = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        self._misses[name] = Miss.of(found, grad)


def check_misses(misses: Mapping[str, Miss]) -> None:
    """Whether the examples' gradients add up to the batch's: if not, a parameter is used where nobody watches."""
    # Some gradients are zero but for rounding (the bias of an attention's keys), so the largest sets the scale.
    noise = 1e-3 * max(miss.length for miss in misses.values())
    for name, (error, length) in misses.items():
        if error > 0.1 * length + noise:
            raise ValueError(
                f"the gradients of single examples do not add up to that of the batch for the parameter {name!r} "
                f"(they miss it by {error:.3g}, its length is {length:.3g}): it is used somewhere "
                "outside of its layer, where it cannot be watched; use the layer itself, or source='batch'"
            )

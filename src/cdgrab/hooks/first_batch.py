"""The first batch, held against the gradient that `backward()` leaves: what nobody watches cannot be told otherwise.

A weight may be used outside of its layer, where no hook sees it. Then the gradients of single examples do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cdgrab.ghost.plan import check_sums
from cdgrab.ghost.records import Record


class FirstBatch:
    """Compares sums of records with the gradients of the parameters, until they have been found equal once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._expected: dict[str, Tensor] = {}
        self._found: dict[str, Tensor] = {}
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
        self._expected.clear()
        self._found.clear()

    def add(self, name: str, record: Record, num: int) -> None:
        """What the record of a parameter says that its gradient is, or a part of it."""
        like = record.tensors[-1]
        if name not in self._found:
            self._found[name] = like.new_zeros(self._shapes[name])
        record.add_to(self._found[name], like.new_ones(num))

    def finish(self) -> None:
        """Compare, and be done with it; raises `ValueError` if there is a difference."""
        grads = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in self._expected.items()}
        wide = {name: torch.promote_types(grad.dtype, torch.float32) for name, grad in grads.items()}
        found = {
            name: self._found[name] if name in self._found else torch.zeros_like(grad, dtype=wide[name])
            for name, grad in grads.items()
        }
        check_sums(found, grads)
        self.stop()

    def stop(self) -> None:
        """Without having compared anything."""
        self.begin()
        for parameter, handle in self._handles:
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # an empty dict would be looked into after every backward pass
        self._handles = []

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        self._expected[name] = grad.detach().clone()

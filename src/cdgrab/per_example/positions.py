"""Tables of positions, told from tables of words by what they are called with."""

from __future__ import annotations

import torch
from torch import Tensor


class Tables:
    """Finds embeddings that are called with the same indices in every batch.

    The batch shares such a table, so that its gradients belong to no example. Mostly its output has no entry for each
    example, which is noticed otherwise. This is for outputs that happen to be as long as the batch, such as a table of
    `positions x positions` with as many positions as examples.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[int | None, Tensor] | None] = {}  # pass and indices, until they differ

    def is_of_positions(self, name: str, index: Tensor, task: int | None) -> bool:
        """Whether the layer called `name` was called with `index` in two backward passes.

        Indices that are the same for all examples tell nothing: every example then has a gradient of its own.
        """
        if name not in self._first:
            # Words have other lengths than the batch, mostly, and need not be compared.
            may_be = index.ndim == 1 or (index.ndim == 2 and index.shape[0] == index.shape[1])
            differ = may_be and bool((index != index[:1]).any())
            self._first[name] = (task, index.clone()) if differ else None
        first = self._first[name]
        if first is None or first[0] == task:
            return False
        if first[1].shape == index.shape and torch.equal(first[1], index):
            return True
        self._first[name] = None
        return False

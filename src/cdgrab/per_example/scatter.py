"""Scatter-add with the same bits every time."""

from __future__ import annotations

from torch import Tensor


def add_at(flat: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to `flat[index]`, where indices may repeat; both of any shape. The same bits every time.

    On a GPU `index_put_` sorts first, while `index_add_` adds in any order. On a CPU it is the other way round.
    """
    if flat.is_cuda:
        flat.index_put_((index.flatten(),), values.flatten(), accumulate=True)
    else:
        flat.index_add_(0, index.flatten(), values.flatten())

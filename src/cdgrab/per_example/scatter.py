"""Adding values at given places, in the same order every time."""

from __future__ import annotations

from torch import Tensor


def add_at(flat: Tensor, index: Tensor, values: Tensor) -> None:
    """`flat[index] += values`, where places may repeat; both of any shape. The same bits every time.

    Each function gives these on its own kind of device only: on a GPU `index_add_` adds in any order, and `index_put_`
    sorts first; on a CPU it is the other way round.
    """
    if flat.is_cuda:
        flat.index_put_((index.flatten(),), values.flatten(), accumulate=True)
    else:
        flat.index_add_(0, index.flatten(), values.flatten())

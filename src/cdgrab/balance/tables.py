"""Tables of inner products: all that deciding signs takes, from whatever holds the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.balance import compiled

_STRETCH = 1 << 14  # columns


def difference_table(first_KD: Tensor, second_KD: Tensor, running_sum_D: Tensor) -> Tensor:
    """Put `first - second` in the place of `first`; the inner products of these rows with each other and with `r`.

    Args:
        first_KD: Float32 or float64, contiguous; overwritten.
        second_KD: Of any floating type.
        running_sum_D: Of the type of `first_KD`.

    Returns:
        `K x (K + 1)` in float64 on the same device: the Gram matrix, and the inner products with `r` as last column.

    Example:
        >>> first = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
        >>> difference_table(first, torch.ones(2, 2), torch.tensor([1.0, 5.0]))
        tensor([[4., 0., 2.],
                [0., 0., 0.]], dtype=torch.float64)
        >>> first
        tensor([[2., 0.],
                [0., 0.]])
    """
    same = second_KD.dtype == first_KD.dtype and second_KD.is_contiguous()
    if first_KD.device.type == "cpu" and same and compiled.available():
        return torch.from_numpy(compiled.difference_table(first_KD.numpy(), second_KD.numpy(), running_sum_D.numpy()))
    table_KK1 = torch.zeros(len(first_KD), len(first_KD) + 1, dtype=torch.float64, device=first_KD.device)
    # On a CPU a stretch of columns at a time: it is in cache when it is multiplied, and sums of single-precision
    # numbers stay short enough to be exact.
    width = _STRETCH if first_KD.device.type == "cpu" else first_KD.shape[1]
    parts = (first_KD.split(width, 1), second_KD.split(width, 1), running_sum_D.split(width))
    for first, second, r in zip(*parts, strict=True):
        first.sub_(second)
        table_KK1 += torch.cat([first @ first.T, (first @ r)[:, None]], dim=1)
    return table_KK1

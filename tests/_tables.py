"""What a table is, from the definition, and what rounding may do to it."""

from __future__ import annotations

import torch
from torch import Tensor


def definition(rows_KD: Tensor, running_sum_D: Tensor) -> Tensor:
    rows_KD = rows_KD.double().cpu()
    return torch.cat([rows_KD @ rows_KD.T, (rows_KD @ running_sum_D.double().cpu())[:, None]], dim=1)


def margin(table: Tensor, dim: int) -> Tensor:
    """What rounding may do to an inner product, relative to the product of the lengths: `dim` roundings.

    And eight more for tensor cores, which take a number as two parts of 11 bits: what is cut off of either factor, and
    the product of the smaller parts.
    """
    lengths = table.diagonal().sqrt()
    return (dim + 8) * torch.finfo(torch.float32).eps * lengths[:, None] * torch.cat([lengths, lengths.max()[None]])

"""Gradients of all units of a step of the LSTM from one backward pass.

The gradient of one unit takes weights that no other unit uses. So the units of a step run side by side in a wider LSTM,
whose weights are block-diagonal: a copy of the weights for every unit. The diagonal blocks of their gradient are the
gradients of the units. On a GPU that takes hardly longer than one unit, as most of it is waiting for the word before;
on a CPU a pass for each unit is faster.

Shapes: `U` units of `c` columns of `t` words, width `w`, `V` words in the vocabulary, `L` layers, `D` parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments.tasks.tools import seeded

GATES = 4


class SideBySide:
    """An LSTM for several units, each with weights of its own.

    Args:
        lstm: The weights. They are read again in every call.
        units: How many.
    """

    def __init__(self, lstm: nn.LSTM, units: int) -> None:
        self._narrow, self._units = lstm, units
        with seeded(0):
            made = nn.LSTM(units * lstm.input_size, units * lstm.hidden_size, lstm.num_layers, batch_first=True)
        self._wide = made.to(next(lstm.parameters()))
        with torch.no_grad():
            for weight in self._wide.parameters():
                weight.zero_()

    def __call__(self, seen_Uctw: Tensor, state_2LUcw: Tensor) -> tuple[Tensor, Tensor]:
        """What the LSTM makes of the units, `U x c x t x w`, and the states that they leave."""
        with torch.no_grad():
            for weight, wide in zip(self._narrow.parameters(), self._wide.parameters(), strict=True):
                self._blocks(wide).copy_(weight.unflatten(0, (GATES, -1))[..., None])
        h, c = state_2LUcw.transpose(2, 3).flatten(3)
        hidden, state = self._wide(seen_Uctw.permute(1, 2, 0, 3).flatten(2), (h, c))
        left = torch.stack(state).unflatten(3, (self._units, -1)).transpose(2, 3)
        return hidden.unflatten(2, (self._units, -1)).permute(2, 0, 1, 3), left

    def parameters(self) -> list[Tensor]:
        """Those to ask a gradient for."""
        return list(self._wide.parameters())

    def of_units(self, grad: Tensor) -> Tensor:
        """The gradient of every unit, `U x numbers`, in the gradient of one of the parameters."""
        return self._blocks(grad.contiguous()).movedim(-1, 0).flatten(1)

    def _blocks(self, wide: Tensor) -> Tensor:
        """The numbers of a parameter that belong to units, `gates x ... x U`."""
        if wide.ndim == 1:
            return wide.view(GATES, self._units, -1).transpose(1, 2)
        return wide.view(GATES, self._units, -1, self._units, wide.shape[1] // self._units).diagonal(dim1=1, dim2=3)


def unit_rows(
    table_Vw: Tensor, lstm: SideBySide, x_Uct: Tensor, y_Uct: Tensor, state_2LUcw: Tensor, rows_UD: Tensor
) -> Tensor:
    """Fill `rows_UD` with the gradient of the mean loss of every unit; return the states that units leave.

    Args:
        table_Vw: Weight of the embedding, which is that of the decoder too.
        lstm: For as many units.
        x_Uct: Words.
        y_Uct: The words after them.
        state_2LUcw: The state that every unit starts with.
        rows_UD: The table's numbers come first, then those of the LSTM.
    """
    num, of_unit = len(x_Uct), x_Uct[0].numel()
    tables_UVw = table_Vw.detach().expand(num, -1, -1).contiguous().requires_grad_()
    offset_U11 = torch.arange(num, device=x_Uct.device)[:, None, None] * len(table_Vw)
    hidden_Uctw, left_2LUcw = lstm(F.embedding(x_Uct + offset_U11, tables_UVw.flatten(0, 1)), state_2LUcw)
    scores_UNV = torch.bmm(hidden_Uctw.flatten(1, 2), tables_UVw.transpose(1, 2))
    loss = F.cross_entropy(scores_UNV.flatten(0, 1), y_Uct.flatten(), reduction="sum") / of_unit
    of_tables, *of_weights = torch.autograd.grad(loss, [tables_UVw, *lstm.parameters()])
    torch.cat([of_tables.flatten(1), *(lstm.of_units(grad) for grad in of_weights)], 1, out=rows_UD)
    return left_2LUcw.detach()

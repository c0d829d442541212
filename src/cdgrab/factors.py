"""Factors: the gradients of single examples with respect to one parameter, in the form in which a layer has them.

Example `i` of a linear layer with inputs `a` and output gradients `b` has the gradient `sum_t outer(b_it, a_it)`. Rows,
sketches and the gradient of the batch all follow from `a` and `b`. Five forms cover every layer:

    Matrix      factors `a` and `b`, as above
    Lookup      the same for an embedding, whose `a` are indices of rows of its table
    Convolved   the same for a convolution, whose `a` are patches of its input (`per_example/layers/convolution.py`)
    Summed      vectors whose sum over positions is the gradient, for biases and norms
    Rows        the gradients themselves, for all other layers

Shapes: `N` examples, `T` positions, `p` inputs, `q` outputs of a layer; `D` numbers of the parameter, `k` of a sketch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cdgrab.per_example.scatter import add_at
from cdgrab.per_example.sketch_maps import Paired, Spread

__all__ = ["Factors", "Lookup", "Matrix", "Rows", "Summed", "by_example"]


class Factors(Protocol):
    """Gradients of `N` examples with respect to one parameter."""

    def __len__(self) -> int:
        """The number of examples."""

    def scaled(self, factor: float) -> Factors:
        """The same gradients, times `factor`."""

    def rows(self) -> Tensor:
        """The gradients as rows, `N x D`."""

    def paired(self, paired: Paired) -> Tensor:
        """The gradients mapped by `paired`, `N x k`."""

    def spread(self, spread: Spread) -> Tensor:
        """The gradients mapped by `spread`, `N x spread.size`."""

    def total(self) -> Tensor:
        """The sum over examples, which is the batch's gradient: `D` numbers in any shape."""


@dataclass(frozen=True)
class Rows:
    """Gradients as rows."""

    rows_ND: Tensor

    def __len__(self) -> int:
        return len(self.rows_ND)

    def scaled(self, factor: float) -> Rows:
        return Rows(self.rows_ND * factor)

    def rows(self) -> Tensor:
        return self.rows_ND

    def paired(self, paired: Paired) -> Tensor:
        return paired.of_rows(self.rows_ND)

    def spread(self, spread: Spread) -> Tensor:
        return spread.of_rows(self.rows_ND)

    def total(self) -> Tensor:
        return self.rows_ND.sum(0)


@dataclass(frozen=True)
class Summed:
    """Gradients `sum_t vector_t`."""

    vectors_NTp: Tensor

    def __len__(self) -> int:
        return len(self.vectors_NTp)

    def scaled(self, factor: float) -> Summed:
        return Summed(self.vectors_NTp * factor)

    def rows(self) -> Tensor:
        if self.vectors_NTp.shape[1] > 1:
            return self.vectors_NTp.sum(1)
        return self.vectors_NTp[:, 0].clone()  # autograd may add to it in place

    def paired(self, paired: Paired) -> Tensor:
        return paired.of_rows(self.rows())

    def spread(self, spread: Spread) -> Tensor:
        return spread.of_rows(self.rows())

    def total(self) -> Tensor:
        return self.vectors_NTp.sum((0, 1))


@dataclass(frozen=True)
class Matrix:
    """Gradients `sum_t outer(b_t, a_t)` of a `q x p` parameter."""

    a_NTp: Tensor
    b_NTq: Tensor

    def __len__(self) -> int:
        return len(self.a_NTp)

    def scaled(self, factor: float) -> Matrix:
        return Matrix(self.a_NTp, self.b_NTq * factor)

    def rows(self) -> Tensor:
        return (self.b_NTq.mT @ self.a_NTp).flatten(1)

    def paired(self, paired: Paired) -> Tensor:
        return paired.summed(self.a_NTp, self.b_NTq)

    def spread(self, spread: Spread) -> Tensor:
        if self.a_NTp.shape[1] == 1:
            return spread.of_outer(self.a_NTp[:, 0], self.b_NTq[:, 0])
        return spread.of_rows(self.rows())

    def total(self) -> Tensor:
        return self.b_NTq.flatten(0, 1).T @ self.a_NTp.flatten(0, 1)


@dataclass(frozen=True)
class Lookup:
    """Gradients of a `num_rows x q` table, of which position `t` used row `index_t`."""

    index_NT: Tensor
    b_NTq: Tensor
    num_rows: int

    def __len__(self) -> int:
        return len(self.index_NT)

    def scaled(self, factor: float) -> Lookup:
        return Lookup(self.index_NT, self.b_NTq * factor, self.num_rows)

    def rows(self) -> Tensor:
        num, _, q = self.b_NTq.shape
        rows_ND = self.b_NTq.new_zeros(num, self.num_rows * q)
        line_NT = torch.arange(num, device=rows_ND.device)[:, None] * self.num_rows + self.index_NT
        place_NTq = line_NT[:, :, None] * q + torch.arange(q, device=rows_ND.device)
        add_at(rows_ND.view(-1), place_NTq, self.b_NTq)
        return rows_ND

    def spread(self, spread: Spread) -> Tensor:
        return spread.of_lookups(self.index_NT, self.b_NTq)

    def paired(self, paired: Paired) -> Tensor:
        some = paired.at_a_time(self.b_NTq, self.index_NT.shape[1])
        parts = [
            paired.product(paired.inputs(b_NTq), paired.outputs.of_units(index_NT, b_NTq))
            for index_NT, b_NTq in zip(self.index_NT.split(some), self.b_NTq.split(some), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def total(self) -> Tensor:
        b_Mq, index_M = self.b_NTq.flatten(0, 1), self.index_NT.flatten()
        found: Tensor = torch.ops.aten.embedding_dense_backward(b_Mq, index_M, self.num_rows, -1, False)
        return found


def by_example(x: Tensor, num: int) -> Tensor:
    """`x` as `N x T x features`, from any shape whose leading dimensions hold the positions example by example."""
    return x.reshape(num, -1, x.shape[-1])

"""Linear layers: the input and the output gradient are the factors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cdgrab.factors import Matrix, Summed, by_example
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors
from cdgrab.per_example.layers.unknown import OneByOne


class _OtherLinear(OneByOne):
    takes_flattened = True


class LinearAdapter(LayerAdapter):
    """Serves `Linear`, with any number of positions."""

    takes_flattened = True
    parameters = ("weight", "bias")
    fallback = _OtherLinear()

    def matrices(self, module: nn.Linear) -> tuple[str, ...]:  # noqa: ARG002
        return ("weight",)

    def factors(self, module: nn.Linear, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        a_NTp, b_NTq = by_example(x, num), by_example(grad, num)
        return {"weight": Matrix(a_NTp, b_NTq), **({} if module.bias is None else {"bias": Summed(b_NTq)})}


class TransposedLinearAdapter(LinearAdapter):
    """Serves `Conv1D` of the transformers package: a linear layer whose weight is stored as inputs x outputs."""

    def factors(self, module: Any, x: Tensor, grad: Tensor, num: int) -> LayerFactors:  # noqa: ARG002
        a_NTp, b_NTq = by_example(x, num), by_example(grad, num)
        return {"weight": Matrix(b_NTq, a_NTp), "bias": Summed(b_NTq)}

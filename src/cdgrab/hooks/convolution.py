"""Convolutions that are given the gradient of their weights by whoever has found it already.

That gradient is the sum of what single examples give, and on a CPU it takes as long to find as all of these. So where
rows are written down anyway, a backward pass need not find it once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn import functional as F


def within_transform() -> bool:
    """Whether a function of `torch.func` is under way, in which tensors stand for others."""
    return torch._C._functorch.maybe_current_level() is not None


class Given:
    """What one use of a convolution is given in a backward pass: gradients of its parameters, by name."""

    __slots__ = ("_found", "_grad", "_version")

    def __init__(self) -> None:
        self._grad: Tensor | None = None
        self._version = 0
        self._found: dict[str, Tensor] = {}

    def leave(self, grad: Tensor, found: dict[str, Tensor]) -> None:
        """What was found with this gradient of the output."""
        self._grad, self._version, self._found = grad, grad._version, found

    def take(self, grad: Tensor) -> dict[str, Tensor]:
        """What has been left, unless the gradient is another one: hooks of others may have replaced it since."""
        same = grad is self._grad and grad._version == self._version
        found = self._found
        self.clear()
        return found if same else {}

    def clear(self) -> None:
        self._grad, self._found = None, {}


class _Convolution(Function):
    """The module's own convolution, but for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.geometry = module.stride, module.padding, module.dilation, module.groups
        ctx.given = Given()
        convolve: Any = F.conv1d if isinstance(module, nn.Conv1d) else F.conv2d
        found: Tensor = convolve(x, weight, bias, *ctx.geometry)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        given: Given = ctx.given
        found = {} if torch.is_grad_enabled() else given.take(grad)  # which has no history to differentiate again
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        wanted = [of_x, of_weight and "weight" not in found, of_bias and "bias" not in found]
        others: tuple[Tensor | None, ...] = (None, None, None)
        if any(wanted):
            stride, padding, dilation, groups = ctx.geometry
            zeros = [0] * len(stride)
            others = torch.ops.aten.convolution_backward(
                grad, x, weight, ctx.bias_sizes, stride, padding, dilation, False, zeros, groups, wanted
            )
        return (
            others[0],
            found.get("weight", others[1]) if of_weight else None,
            found.get("bias", others[2]) if of_bias else None,
            None,
        )


_apply: Any = _Convolution.apply


def given_in(output: Tensor) -> Given | None:
    """What the pass that comes back through this output of a layer can be given, if that is possible."""
    return getattr(output.grad_fn, "given", None)


class StandIn:
    """Takes the place of a convolution's `forward`, until it is removed. Parameters and results are the same."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._module.forward = self

    @staticmethod
    def serves(module: nn.Module) -> bool:
        """Whether there is something to be gained. Whoever has put something else in its place already goes first."""
        return type(module) in (nn.Conv1d, nn.Conv2d) and "forward" not in vars(module)

    def __call__(self, input: Tensor) -> Tensor:  # named as the module names it
        module = self._module
        weight = module.weight
        plain = (
            torch.is_grad_enabled()
            and weight.requires_grad
            and input.device.type == weight.device.type == "cpu"
            and type(input) is Tensor
            and input.ndim == weight.ndim
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and not within_transform()
            and forward_ad._current_level < 0
        )
        if not plain:
            own: Tensor = type(module).forward(module, input)
            return own
        output: Tensor = _apply(input, weight, module.bias, module)
        return output

    def remove(self) -> None:
        if vars(self._module).get("forward") is self:
            del self._module.forward

"""Convolutions that are given the gradient of their weights by whoever has found it already.

That gradient is the sum of what single examples give, and on a CPU it takes as long to find as all of these. So where
rows are written down anyway, a backward pass need not find it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn import functional as F

from cdgrab.hooks.engine import within_transform

Found = dict[str, Tensor]  # gradients of a layer's parameters, by name


class Given:
    """What one use of a convolution is given in a backward pass."""

    __slots__ = ("_check", "_found", "_grad", "_version")

    def __init__(self) -> None:
        self._grad: Tensor | None = None
        self._version = 0
        self._found: Found = {}
        self._check: Callable[[Found, Found], None] | None = None

    def leave(self, grad: Tensor, found: Found, check: Callable[[Found, Found], None] | None = None) -> None:
        """What was found with this gradient of the output; it may be held against what the layer itself finds."""
        self._grad, self._version, self._found, self._check = grad, grad._version, found, check

    def take(self, grad: Tensor) -> tuple[Found, Callable[[Found, Found], None] | None]:
        """What has been left, unless the gradient is another one: hooks of others may have replaced it since.

        One that was changed behind autograd's back, through `.data`, is not noticed.
        """
        same = grad is self._grad and grad._version == self._version
        found, check = self._found, self._check
        self.clear()
        return (found, check) if same else ({}, None)

    def clear(self) -> None:
        self._grad, self._found, self._check = None, {}, None


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
        # What has been given has no history, and cannot be differentiated again.
        found, check = ({}, None) if torch.is_grad_enabled() else given.take(grad)
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        own = {"weight": of_weight, "bias": of_bias}
        wanted = [of_x, *(own[key] and (key not in found or check is not None) for key in own)]
        others: tuple[Tensor | None, ...] = (None, None, None)
        if any(wanted):
            stride, padding, dilation, groups = ctx.geometry
            zeros = [0] * len(stride)
            others = torch.ops.aten.convolution_backward(
                grad, x, weight, ctx.bias_sizes, stride, padding, dilation, False, zeros, groups, wanted
            )
        by_key = dict(zip(own, others[1:], strict=True))
        if check is not None:
            check(found, {key: there for key in found if (there := by_key[key]) is not None})
        return others[0], *(found.get(key, by_key[key]) if own[key] else None for key in own), None


_apply: Any = _Convolution.apply


def given_in(output: Tensor) -> Given | None:
    """What the pass that comes back through this output of a layer can be given, if that is possible."""
    return getattr(output.grad_fn, "given", None)


def _can_be_given(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and module.weight.requires_grad
        and x.device.type == module.weight.device.type == "cpu"
        and type(x) is Tensor
        and x.ndim == module.weight.ndim
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not within_transform()
        and forward_ad._current_level < 0
    )


def _convolved(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    found: Tensor = _apply(x, module.weight, module.bias, module)
    return found


# Named as what they stand for, which is what printing a model and messages show.


class Conv1d(nn.Conv1d):
    """The same, whose gradients can be given."""

    stands_for = nn.Conv1d

    def forward(self, input: Tensor) -> Tensor:
        return _convolved(self, input) if _can_be_given(self, input) else super().forward(input)


class Conv2d(nn.Conv2d):
    """The same, whose gradients can be given."""

    stands_for = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        return _convolved(self, input) if _can_be_given(self, input) else super().forward(input)


_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {kind.stands_for: kind for kind in (Conv1d, Conv2d)}


class StandIn:
    """Puts a module into the class that stands in for its own, until it is removed: copies of it are right as well.

    Parameters and results are the same.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.__class__ = _STAND_INS[type(module)]

    @staticmethod
    def serves(module: nn.Module) -> bool:
        """Whether there is something to be gained. Whoever has put something else in its place already goes first."""
        return type(module) in _STAND_INS and "forward" not in vars(module)

    def remove(self) -> None:
        self._module.__class__ = getattr(type(self._module), "stands_for", type(self._module))

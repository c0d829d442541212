"""Convolutions: linear layers on patches of their input.

Shapes: `N` examples, `T` positions of an output, `p` numbers of a patch, `q` channels of an output; `S` positions of
an input, `F` frequencies of a sketch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from cdgrab.factors import Factors, Rows
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors
from cdgrab.per_example.layers.unknown import OneByOne
from cdgrab.per_example.sketch_maps import Paired, Spread

_MOST_COPIED = {"cpu": 1 << 19, "cuda": 1 << 26}  # numbers: a CPU keeps them in cache, a GPU has room


class _OtherConvolution(OneByOne):
    channels_first = True


class ConvolutionAdapter(LayerAdapter):
    """Serves `Conv1d` and `Conv2d` padded with zeros. With groups, it materialises the gradients."""

    channels_first = True
    parameters = ("weight", "bias")
    fallback = _OtherConvolution()

    def takes(self, module: nn.Conv1d | nn.Conv2d) -> bool:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str) and super().takes(module)

    def matrices(self, module: nn.Conv1d | nn.Conv2d) -> tuple[str, ...]:
        return ("weight",) if module.groups == 1 else ()

    def factors(self, module: nn.Conv1d | nn.Conv2d, x: Tensor, grad: Tensor, num: int) -> LayerFactors:  # noqa: ARG002
        sizes: list[Any] = [module.kernel_size, module.dilation, module.padding, module.stride]
        if x.ndim == 3:  # a line is an image of height one
            x, grad = x[:, :, None], grad[:, :, None]
            sizes = [(first, *size) for first, size in zip((1, 1, 0, 1), sizes, strict=True)]
        geometry = Geometry(tuple(grad.shape[2:]), *sizes)
        weight: Factors = Convolved(x, grad, geometry)
        if module.groups > 1:
            weight = Rows(weight_rows(x, grad, geometry, module.groups))
        return {"weight": weight, **({} if module.bias is None else {"bias": Rows(grad.flatten(2).sum(2))})}


class Geometry(NamedTuple):
    """Height and width of the outputs, and the options of the convolution."""

    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Convolved:
    """Factors of a convolution in two dimensions without groups: inputs and output gradients."""

    x: Tensor
    grad: Tensor
    geometry: Geometry

    def __len__(self) -> int:
        return len(self.x)

    def scaled(self, factor: float) -> Convolved:
        return replace(self, grad=self.grad * factor)

    def rows(self) -> Tensor:
        geometry = self.geometry
        numbers = self.x.shape[1] * geometry.kernel[1] * self.x[0, 0].numel()
        some = max(1, _MOST_COPIED.get(self.x.device.type, 1 << 19) // numbers)
        parts = zip(self.x.split(some), self.grad.split(some), strict=True)
        return torch.cat([weight_rows(x, grad, geometry) for x, grad in parts])

    def spread(self, spread: Spread) -> Tensor:
        return spread.of_rows(self.rows())

    def paired(self, paired: Paired) -> Tensor:
        """`N x k`: the sketches, without patches: convolves features of the channels with the signs of the window.

        With many positions, or few weights, it materialises rows and sketches these.
        """
        if paired.prefers_rows(math.prod(self.geometry.outputs), 2 + math.prod(self.geometry.kernel) / 3):
            return paired.of_rows(self.rows())
        some = paired.at_a_time(self.x, self.x[0, 0].numel())
        parts = [
            paired.product(self._features(paired, x), paired.outputs(grad.flatten(2).mT))
            for x, grad in zip(self.x.split(some), self.grad.split(some), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _features(self, paired: Paired, x: Tensor) -> Tensor:
        """`N x T x F`: the features of the patches."""
        _, kernel, dilation, padding, stride = self.geometry
        if math.prod(kernel) == 1:
            padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
            return paired.inputs(padded[:, :, :: stride[0], :: stride[1]].flatten(2).mT)
        a_NSF = paired.inputs(x.flatten(2).mT)
        # conv2d is real here: real and imaginary parts are channels of their own.
        parts_NChw = torch.view_as_real(a_NSF).flatten(2).mT.unflatten(2, x.shape[2:])
        signs_C1hw = paired.window_signs(x).repeat_interleave(2, 0).view(-1, 1, *kernel)
        found = F.conv2d(parts_NChw, signs_C1hw, None, stride, padding, dilation, groups=len(signs_C1hw))
        return torch.view_as_complex(found.flatten(2).mT.unflatten(2, (-1, 2)).contiguous())

    def total(self) -> Tensor:
        """The batch's gradient, computed as the layer's own backward does, without patches."""
        geometry = self.geometry
        shape = torch.Size((self.grad.shape[1], self.x.shape[1], *geometry.kernel))
        found: Tensor = conv2d_weight(self.x, shape, self.grad, geometry.stride, geometry.padding, geometry.dilation)
        return found


def weight_rows(x: Tensor, grad: Tensor, geometry: Geometry, groups: int = 1) -> Tensor:
    """`N x D`: the weight's gradients, materialised.

    One line of the window at a time: then inputs are copied for its width only, not for all of its places.
    """
    (rows, columns), kernel, dilation, padding, stride = geometry
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    x = x.contiguous()
    (num, channels, height), (of_example, of_channel, of_line, of_column) = x.shape[:3], x.stride()
    shape = (num, channels, kernel[1], height, columns)
    strides = (of_example, of_channel, dilation[1] * of_column, of_line, stride[1] * of_column)
    wide = x.as_strided(shape, strides).reshape(num, groups, -1, height, columns)
    grad_NgqT = grad.reshape(num, groups, -1, rows * columns)
    parts = []
    for line in range(kernel[0]):
        first = line * dilation[0]
        lines = wide[:, :, :, first : first + stride[0] * (rows - 1) + 1 : stride[0]]
        parts.append(grad_NgqT @ lines.flatten(3).mT)
    stacked = torch.stack([part.unflatten(3, (-1, kernel[1])) for part in parts], 4)
    return stacked.flatten(1)

"""Gradients of a convolution: those of a linear layer on patches of its input, or short ones without any patches.

Shapes: `N` examples, `T` positions of an output, `p` numbers of a patch, `q` channels of an output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from cdgrab.ghost import correlated
from cdgrab.ghost.outer import outer_sums
from cdgrab.ghost.records import MOST_NUMBERS_ON_GPU, Matrix, Rows, kept

_CACHED = 1 << 19  # numbers that a CPU keeps at hand


class Geometry(NamedTuple):
    """Height and width of the outputs, and how they come about."""

    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Convolved:
    """Inputs and output gradients of a convolution in two dimensions, without groups."""

    x: Tensor
    grad: Tensor
    geometry: Geometry

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.grad)

    def like(self, tensors: tuple[Tensor, ...]) -> Convolved:
        x, grad = tensors
        return Convolved(x, grad, self.geometry)

    def negated(self) -> Convolved:
        return Convolved(self.x, -self.grad, self.geometry)

    def scaled(self, factor: float) -> Convolved:
        return Convolved(self.x, self.grad * factor, self.geometry)

    def compact(self) -> Matrix | Rows:
        """Patches repeat what they overlap in: rows are smaller but for a layer of many channels and few positions."""
        positions, q = math.prod(self.geometry.outputs), self.grad.shape[1]
        p = self.x.shape[1] * math.prod(self.geometry.kernel)
        if p * q > positions * (p + q):
            return Matrix(patches(self.x, self.geometry).mT, self.grad.flatten(2).mT)
        geometry = self.geometry
        if math.prod(geometry.kernel) > 1 and correlated.takes(self.x, self.grad, geometry.stride):
            return Rows(correlated.rows(self.x, self.grad, geometry.kernel, geometry.dilation, geometry.padding))
        # Some examples at a time: on a CPU their patches are still in cache when they are multiplied, a GPU has room.
        some = max(1, (MOST_NUMBERS_ON_GPU if self.x.is_cuda else _CACHED) // (p * positions))
        parts = zip(self.x.split(some), self.grad.split(some), strict=True)
        return Rows(torch.cat([(b.flatten(2) @ patches(a, geometry).mT).flatten(1) for a, b in parts]))

    @property
    def has_short_rows(self) -> bool:
        """Whether rows take no more numbers than what the layer saw."""
        return self.grad.shape[1] * self.x.shape[1] * math.prod(self.geometry.kernel) <= (
            self.x[0].numel() + self.grad[0].numel()
        )

    def rows(self) -> Tensor:
        return self.compact().rows()

    def projected(self, patch_kp: Tensor, channel_mq: Tensor | None) -> Tensor:
        """`N x m x k`: rows as matrices `q x p`, projected from both sides; from the left not at all without `channel`.

        A patch times a direction is what a convolution does, so no patch is ever copied.
        """
        filters = patch_kp.view(len(patch_kp), self.x.shape[1], *self.geometry.kernel)
        geometry = self.geometry
        a_NkT = F.conv2d(
            self.x, filters, stride=geometry.stride, padding=geometry.padding, dilation=geometry.dilation
        ).flatten(2)
        return outer_sums(self.grad.flatten(2).mT, channel_mq, a_NkT.mT, None)

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.compact().products(r)

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        """As the layer itself would, without patches."""
        geometry, x, grad = self.geometry, kept(self.x, weights_N), kept(self.grad, weights_N)
        shape = torch.Size((grad.shape[1], x.shape[1], *geometry.kernel))
        weighted = grad * weights_N.view(-1, 1, 1, 1)
        found = conv2d_weight(x, shape, weighted, geometry.stride, geometry.padding, geometry.dilation)
        r.add_(found.view_as(r))


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """`F.unfold`, `N x p x T`, in one copy.

    It takes a third of the time of `F.unfold` itself on a CPU; on a GPU that one goes example by example.
    """
    outputs, kernel, dilation, padding, stride = geometry
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    x = x.contiguous()
    (num, channels), (of_example, of_channel, of_line, of_column) = x.shape[:2], x.stride()
    view = x.as_strided(
        (num, channels, *kernel, *outputs),
        (
            of_example,
            of_channel,
            dilation[0] * of_line,
            dilation[1] * of_column,
            stride[0] * of_line,
            stride[1] * of_column,
        ),
    )
    return view.reshape(num, -1, math.prod(outputs))

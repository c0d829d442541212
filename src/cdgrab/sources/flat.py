"""A model's gradients as one row, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def flat_grad(model: nn.Module) -> Tensor:
    """The gradients of all trainable parameters as one new row, in the order of `model.parameters()`.

    A parameter without a gradient counts as zero. The row is what `backward()` left in `.grad`: the mean over the batch
    for a mean loss, the sum for a sum loss. Its scale does not matter as long as it is the same for all units.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> flat_grad(layer)
        tensor([1., 1., 1.])
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; there is no gradient to order by")
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    return torch.cat([(grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1) for grad in grads])


def set_flat_grad(model: nn.Module, row_D: Tensor) -> None:
    """Write a row into `.grad`: the inverse of `flat_grad`, for loops that average rows themselves."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dim = sum(parameter.numel() for parameter in trainable)
    if row_D.numel() != dim:
        raise ValueError(
            f"the row has {row_D.numel()} numbers, the model {dim} trainable parameters; pass a row of flat_grad(model)"
        )
    for parameter, part in zip(trainable, row_D.split([p.numel() for p in trainable]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)

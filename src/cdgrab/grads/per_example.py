"""One row per example by `torch.func`: exact for any model that treats its examples independently."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


def per_example_grads(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """Gradients of every example's own loss, one row each; their mean is the gradient of the mean loss.

    Args:
        model: A model whose output for an example does not depend on the others (no batch normalisation in
            training mode).
        loss_fn: Maps outputs and targets of a batch to a scalar. It is called with batches of one.
        inputs: Examples along the first dimension.
        targets: Their targets.

    Returns:
        A `examples x dim` tensor, columns in the order of `flat_grad`.

    Example:
        >>> rows = per_example_grads(nn.Linear(3, 1), nn.functional.mse_loss, torch.randn(8, 3), torch.randn(8, 1))
        >>> rows.shape
        torch.Size([8, 4])
    """
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    buffers = dict(model.named_buffers())

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(functional_call(model, (params, frozen, buffers), (x[None],)), y[None])

    # Dropout and the like draw anew for every example, as they do in a batch.
    grads = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")(params, inputs, targets)
    return torch.cat([g.flatten(1) for g in grads.values()], dim=1)

"""One row per example with `torch.func`: exact for any model that treats its examples independently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from cdgrab.per_example.layers.norms import check_mixing, mixing_layers


def per_example_grads(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """The gradient of every example's own loss, one row each; their mean is the gradient of the mean loss.

    Args:
        model: A model whose output for an example does not depend on the others (no batch normalisation in
            training mode).
        loss_fn: Maps outputs and targets of a batch to a scalar. It is called with batches of one.
        inputs: Examples along the first dimension.
        targets: Targets of the examples.

    Returns:
        An `examples x dim` tensor, columns in the order of `flat_grad`.

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

    for name, module in mixing_layers(model):
        check_mixing(name, module)
    # Dropout and the like draw for each example, as they do in a batch.
    compute = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
    try:
        grads = compute(params, inputs, targets)
    except RuntimeError as error:
        remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in str(error)), None)
        if remedy is None:
            raise
        layer = _failing_layer(model, lambda: compute(params, inputs, targets))
        raise ValueError(f"layer {layer}: {remedy}") from error
    return torch.cat([g.flatten(1) for g in grads.values()], dim=1)


_CHECKPOINTED = (
    "torch.func does not support activation checkpointing; switch it off, or use attach(model, source='sketch')"
)
# Remedies by what torch.func's message contains.
_REMEDIES = {
    "data-dependent control flow": "it branches on the values of an example (or calls .item()), which torch.func "
    "cannot do for all examples at once; use torch.where, or attach(model, source='sketch')",
    "saved tensor hooks": _CHECKPOINTED,
    "_NoopSaveInputs": _CHECKPOINTED,  # what torch 2.6 says
    "autograd.Function": "its autograd.Function has no rule for batches; give it one (generate_vmap_rule), or use "
    "attach(model, source='sketch')",
}


def _failing_layer(model: nn.Module, again: Callable[[], object]) -> str:
    """The innermost layer that runs when `again` fails."""
    running: list[str] = []
    handles: list[Any] = []
    for name, module in model.named_modules():
        title = f"{name or 'the model'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, title=title: running.append(title)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        again()
    except RuntimeError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return running[-1] if running else "the loss function"

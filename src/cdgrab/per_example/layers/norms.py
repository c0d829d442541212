"""Norms: gradients small enough to be formed.

Batch normalisation mixes the examples of a batch in training, so that none has a gradient of its own. What its layer
saw of every example still adds up to the gradient of the batch, and that is what is balanced.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab.factors import Rows, Summed
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors
from cdgrab.per_example.layers.unknown import OneByOne


class LayerNormAdapter(LayerAdapter):
    """Serves `LayerNorm` and `RMSNorm`."""

    parameters = ("weight", "bias")

    def factors(self, module: nn.LayerNorm | nn.RMSNorm, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        norm: Any = F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
        normed, numel = norm(x, module.normalized_shape, eps=module.eps), math.prod(module.normalized_shape)
        found: LayerFactors = {"weight": Summed((normed * grad).reshape(num, -1, numel))}
        if getattr(module, "bias", None) is not None:
            found["bias"] = Summed(grad.reshape(num, -1, numel))
        return found


class _OtherGroupNorm(OneByOne):
    channels_first = True


class GroupNormAdapter(LayerAdapter):
    """Serves `GroupNorm`."""

    channels_first = True
    parameters = ("weight", "bias")
    fallback = _OtherGroupNorm()

    def factors(self, module: nn.GroupNorm, x: Tensor, grad: Tensor, num: int) -> LayerFactors:  # noqa: ARG002
        normed = F.group_norm(x, module.num_groups, eps=module.eps)
        grad_NcT, scaled_NcT = (part.reshape(*part.shape[:2], -1) for part in (grad, normed * grad))
        return {"weight": Rows(scaled_NcT.sum(2)), "bias": Rows(grad_NcT.sum(2))}


class RmsNormAdapter(LayerAdapter):
    """Serves the RMSNorm of a model in the transformers package, which most of these models define on their own."""

    parameters = ("weight",)
    fallback = OneByOne()

    def takes(self, module: Any) -> bool:
        return _eps_of(module) is not None and super().takes(module)

    def factors(self, module: Any, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        numel = module.weight.numel()
        normed = F.rms_norm(x, (numel,), eps=_eps_of(module))
        return {"weight": Summed((normed * grad).reshape(num, -1, numel))}


def _eps_of(module: Any) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class OtherBatchNorm(OneByOne):
    """Serves batch normalisation of any other kind, such as `SyncBatchNorm`, but not in training."""

    channels_first = True

    def check(self, name: str, module: Any) -> None:
        if module.training:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) takes statistics of examples that it does not see; use "
                "BatchNorm, or put the layer into eval mode"
            )


class BatchNormAdapter(LayerAdapter):
    """Serves `BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d`, with statistics of the batch or running ones."""

    channels_first = takes_flattened = True
    parameters = ("weight", "bias")
    fallback = OtherBatchNorm()

    def factors(self, module: nn.BatchNorm2d, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        of_batch = module.training or module.running_mean is None
        mean, var = (None, None) if of_batch else (module.running_mean, module.running_var)
        normed = F.batch_norm(x, mean, var, training=of_batch, momentum=0.0, eps=module.eps)
        parts = {"weight": normed * grad, "bias": grad}
        if grad.ndim == 2:
            return {name: Summed(part.reshape(num, -1, part.shape[1])) for name, part in parts.items()}
        return {name: Rows(part.flatten(2).sum(2)) for name, part in parts.items()}


def mixing_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that may take statistics of the batch, with or without parameters, by name."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def check_mixing(name: str, module: nn.Module) -> None:
    """Raise `ValueError` if a layer takes statistics of the batch: then no example has a gradient of its own."""
    if module.training:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so that none of them has a "
            "gradient of its own; use GroupNorm, or put the layer into eval mode"
        )

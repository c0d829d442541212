"""MultiheadAttention: the factors of its projections, from a second run of the attention.

The projections are linear layers that do not run as modules, so hooks do not see their outputs. The adapter computes
them again and differentiates the attention with respect to them. Their factors are then those of linear layers.

Shapes: `N` examples of `L` queries and `S` keys, `E` numbers each, in `h` heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from cdgrab.factors import Matrix, Rows
from cdgrab.per_example.layers.base import LayerFactors, check_repeatable, weights_of
from cdgrab.per_example.layers.unknown import OneByOne

_SEPARATE_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class _OtherAttention(OneByOne):
    is_whole = True

    def check(self, name: str, module: Any) -> None:
        check_repeatable(name, module)


class AttentionAdapter(_OtherAttention):
    """Serves `MultiheadAttention`. Added keys, and gradients of attention weights, are left to the fallback."""

    parameters = (*_SEPARATE_WEIGHTS, "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    fallback = _OtherAttention()

    def takes(self, module: Any) -> bool:
        return not module.add_zero_attn and super().takes(module)

    def matrices(self, module: Any) -> list[str]:
        return weights_of(module)

    def factors_again(self, module: Any, args: Any, kwargs: Any, grads: list[Tensor | None], num: int) -> LayerFactors:
        call, grad_NLE = _named_arguments(*args, **kwargs), grads[0]
        inputs = [call[name] for name in ("query", "key", "value")]
        if grad_NLE is None or any(g is not None for g in grads[1:]) or any(part.ndim != 3 for part in inputs):
            return super().factors_again(module, args, kwargs, grads, num)
        dtype = grad_NLE.dtype
        weights, biases = _projections(module, dtype)
        a = [part.detach().to(dtype) for part in inputs]
        projected = [linear(x, weight, bias) for x, weight, bias in zip(a, weights, biases, strict=True)]
        with torch.enable_grad():
            q, k, v = (_by_head(part.requires_grad_(), module.num_heads) for part in projected)
            found_NhLd = scaled_dot_product_attention(q, k, v, _mask(call, module.num_heads, dtype))
            mixed_NLE = found_NhLd.transpose(1, 2).flatten(2)
            b = torch.autograd.grad(mixed_NLE, projected, grad_NLE @ module.out_proj.weight.detach().to(dtype))
        found: LayerFactors = {"out_proj.weight": Matrix(mixed_NLE.detach(), grad_NLE)}
        if module.in_proj_bias is not None:
            found["out_proj.bias"] = Rows(grad_NLE.sum(1))
            found["in_proj_bias"] = Rows(torch.cat([part.sum(1) for part in b], 1))
        if module.in_proj_weight is None:
            return found | {name: Matrix(*both) for name, *both in zip(_SEPARATE_WEIGHTS, a, b, strict=True)}
        if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
            return found | {"in_proj_weight": Matrix(a[0], torch.cat(b, 2))}
        rows = [Matrix(*both).rows() for both in zip(a, b, strict=True)]
        return found | {"in_proj_weight": Rows(torch.cat(rows, 1))}


def _named_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,  # noqa: ARG001, named as PyTorch does
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: ARG001
    is_causal: bool = False,  # noqa: ARG001, only says what the mask is
) -> dict[str, Any]:
    return {"query": query, "key": key, "value": value, "padding": key_padding_mask, "mask": attn_mask}


def _projections(module: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:
    """The weights and biases of queries, keys and values."""
    if module.in_proj_weight is None:
        weights = [getattr(module, name) for name in _SEPARATE_WEIGHTS]
    else:
        weights = list(module.in_proj_weight.chunk(3))
    biases = [None] * 3 if module.in_proj_bias is None else [part.to(dtype) for part in module.in_proj_bias.chunk(3)]
    return [weight.detach().to(dtype) for weight in weights], [b if b is None else b.detach() for b in biases]


def _mask(call: dict[str, Any], heads: int, dtype: torch.dtype) -> Tensor | None:
    """The sum of both masks, to be added to the scores (`N x h x L x S`), or None."""
    parts: list[Tensor] = []
    if call["mask"] is not None:
        mask = _additive(call["mask"], dtype)
        parts.append(mask if mask.ndim == 2 else mask.unflatten(0, (-1, heads)))
    if call["padding"] is not None:
        parts.append(_additive(call["padding"], dtype)[:, None, None])
    if len(parts) == 2:
        return parts[0] + parts[1]
    return parts[0] if parts else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.detach().to(dtype)
    summand: Tensor = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
    return summand


def _by_head(part_NTE: Tensor, heads: int) -> Tensor:
    num, length, _ = part_NTE.shape
    return part_NTE.view(num, length, heads, -1).transpose(1, 2)

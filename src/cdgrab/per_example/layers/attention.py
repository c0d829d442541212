"""MultiheadAttention: gradients of its projections from one run of what is between them.

Its projections are linear layers that do not run as modules, so that their outputs are not seen. They are computed once
more, the attention is differentiated with respect to them, and their factors are those of linear layers.

Shapes: `M` sequences of `L` queries and `S` keys, `E` numbers each, in `h` heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from cdgrab.factors import Factors, Matrix, Rows, by_example

_INWARDS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_PARAMETERS = {*_INWARDS, "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}


def attends(module: nn.Module) -> bool:
    """Whether a module is of a kind that is served here: not with keys of its own, nor with weights made of others."""
    if type(module) is not nn.MultiheadAttention or module.add_zero_attn:
        return False
    return {name for name, _ in module.named_parameters()} <= _PARAMETERS


def run_again(module: Any, args: Any, kwargs: Any, grad_MLE: Tensor, num: int) -> dict[str, Factors] | None:
    """Factors of the parameters for `num` examples, each of equally many sequences. None for single sequences.

    Args:
        module: A MultiheadAttention.
        args: What it was called with.
        kwargs: The same by name.
        grad_MLE: Of its output, wide.
        num: Of examples.
    """
    call = _called_with(*args, **kwargs)
    inputs = [call[name] for name in ("query", "key", "value")]
    if any(part.ndim != 3 for part in inputs):
        return None
    dtype = grad_MLE.dtype
    weights, biases = _projections(module, dtype)
    wide = [part.detach().to(dtype) for part in inputs]
    projected = [linear(x, weight, bias) for x, weight, bias in zip(wide, weights, biases, strict=True)]
    with torch.enable_grad():
        q, k, v = (_by_head(part.requires_grad_(), module.num_heads) for part in projected)
        found_MhLd = scaled_dot_product_attention(q, k, v, _mask(call, module.num_heads, dtype))
        mixed_MLE = found_MhLd.transpose(1, 2).flatten(2)
        outwards: Any = module.out_proj
        grads = torch.autograd.grad(mixed_MLE, projected, grad_MLE @ outwards.weight.detach().to(dtype))
    with torch.no_grad():
        b = [by_example(grad, num) for grad in grads]
        a = [by_example(x, num) for x in wide]
        b_out = by_example(grad_MLE, num)
        found: dict[str, Factors] = {"out_proj.weight": Matrix(by_example(mixed_MLE.detach(), num), b_out)}
        if module.in_proj_bias is not None:
            found["out_proj.bias"] = Rows(b_out.sum(1))
            found["in_proj_bias"] = Rows(torch.cat([part.sum(1) for part in b], 1))
        if module.in_proj_weight is None:
            return found | {name: Matrix(*both) for name, *both in zip(_INWARDS, a, b, strict=True)}
        if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
            return found | {"in_proj_weight": Matrix(a[0], torch.cat(b, 2))}
        rows = [Matrix(*both).rows() for both in zip(a, b, strict=True)]
        return found | {"in_proj_weight": Rows(torch.cat(rows, 1))}


def _called_with(
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
    """Weights and biases of queries, keys and values."""
    if module.in_proj_weight is None:
        weights = [getattr(module, name) for name in _INWARDS]
    else:
        weights = list(module.in_proj_weight.chunk(3))
    biases = [None] * 3 if module.in_proj_bias is None else [part.to(dtype) for part in module.in_proj_bias.chunk(3)]
    return [weight.detach().to(dtype) for weight in weights], [b if b is None else b.detach() for b in biases]


def _mask(call: dict[str, Any], heads: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores, of a shape that fits `M x h x L x S`."""
    parts: list[Tensor] = []
    if call["mask"] is not None:
        mask = _as_summand(call["mask"], dtype)
        parts.append(mask if mask.ndim == 2 else mask.unflatten(0, (-1, heads)))
    if call["padding"] is not None:
        parts.append(_as_summand(call["padding"], dtype)[:, None, None])
    if len(parts) == 2:
        return parts[0] + parts[1]
    return parts[0] if parts else None


def _as_summand(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.detach().to(dtype)
    summand: Tensor = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
    return summand


def _by_head(part_MTE: Tensor, heads: int) -> Tensor:
    num, length, _ = part_MTE.shape
    return part_MTE.view(num, length, heads, -1).transpose(1, 2)

"""Layer by layer: from the inputs and output gradients of a module to the factors of its parameters.

A layer that is not in the table runs once more: a recurrent one by `recurrent.py`, attention by `attention.py`, any
other example by example, with `torch.func`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from cdgrab.factors import Factors, Lookup, Matrix, Rows, Summed, by_example
from cdgrab.per_example.layers.attention import attends
from cdgrab.per_example.layers.attention import run_again as run_attention_again
from cdgrab.per_example.layers.convolution import Convolved, Geometry, patches
from cdgrab.per_example.layers.recurrent import Opened, opens
from cdgrab.per_example.layers.recurrent import run_again as run_recurrent_again

LayerFactors = dict[str, Factors]  # by the name of the parameter in the layer
Handler = Callable[[Any, Tensor, Tensor, int], LayerFactors]

# Batch statistics mix examples; there is no gradient of one example then.
MIXES_EXAMPLES = (nn.modules.batchnorm._BatchNorm,)
# Modules whose children do not run as modules, so that only the whole can be looked at.
WHOLE = (nn.MultiheadAttention, nn.RNNBase)


def linear(module: nn.Linear, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
    """The input and the output gradient themselves."""
    a_NTp, b_NTq = by_example(x, num), by_example(grad, num)
    return {"weight": Matrix(a_NTp, b_NTq), **_bias(module, b_NTq)}


def convolution(module: nn.Conv1d | nn.Conv2d, x: Tensor, grad: Tensor, num: int) -> LayerFactors:  # noqa: ARG001
    """A linear layer on patches."""
    kernel: Any
    padding: Any
    if isinstance(module, nn.Conv1d):
        x, grad = x[:, :, None], grad[:, :, None]
        kernel, dilation, padding, stride = (
            (size, *sizes)
            for size, sizes in zip(
                (1, 1, 0, 1), (module.kernel_size, module.dilation, module.padding, module.stride), strict=True
            )
        )
    else:
        kernel, dilation, padding, stride = module.kernel_size, module.dilation, module.padding, module.stride
    geometry = Geometry(tuple(grad.shape[2:]), kernel, dilation, padding, stride)
    weight: Factors
    if module.groups > 1:
        a = patches(x, geometry).unflatten(1, (module.groups, -1))
        weight = Rows((grad.flatten(2).unflatten(1, (module.groups, -1)) @ a.mT).flatten(1))
    else:
        weight = Convolved(x, grad, geometry)
    return {"weight": weight, **({} if module.bias is None else {"bias": Rows(grad.flatten(2).sum(2))})}


def embedding(module: nn.Embedding, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
    """Which rows of the table were used, and with which gradient."""
    index_NT, b_NTq = x.reshape(num, -1), grad.reshape(num, -1, grad.shape[-1])
    if module.padding_idx is not None:
        b_NTq = torch.where((index_NT == module.padding_idx)[..., None], 0.0, b_NTq)
    return {"weight": Lookup(index_NT, b_NTq, module.num_embeddings)}


def layer_norm(module: nn.LayerNorm, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
    """Small enough to be written out."""
    normed = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    return _scale_and_shift(normed * grad, grad, math.prod(module.normalized_shape), num)


def rms_norm(module: nn.RMSNorm, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
    """Small enough to be written out."""
    normed = F.rms_norm(x, module.normalized_shape, eps=module.eps)
    return {"weight": _scale_and_shift(normed * grad, grad, math.prod(module.normalized_shape), num)["weight"]}


def group_norm(module: nn.GroupNorm, x: Tensor, grad: Tensor, num: int) -> LayerFactors:  # noqa: ARG001
    """Small enough to be written out."""
    normed = F.group_norm(x, module.num_groups, eps=module.eps)
    channels = (*range(2, x.ndim),)
    return {"weight": Rows(_summed(normed * grad, channels)), "bias": Rows(_summed(grad, channels))}


HANDLERS: dict[type[nn.Module], Handler] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
}


def handler_of(module: nn.Module) -> Handler | None:
    """The handler of a module; None for one that must be differentiated once more."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and (
        module.padding_mode != "zeros" or isinstance(module.padding, str)
    ):
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return None
    return HANDLERS.get(type(module))


def differentiated(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    grads: list[Tensor | None],
    num: int,
    kept: dict[nn.Module, Opened],
) -> LayerFactors:
    """Factors for any module that treats its examples one by one: it runs once more.

    Recurrent modules and attention run for all of them together, others for each of them. Whatever is as long as the
    outputs are along the first dimension is taken to be laid out example by example. What is `kept` serves later calls.
    """
    leaves, spec = tree_flatten((args, {k: v for k, v in kwargs.items() if k != "attn_mask"}))
    leaves = [widened(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    wide = [None if grad is None else widened(grad) for grad in grads]
    if attends(module) and wide[0] is not None and not any(grad is not None for grad in wide[1:]):
        found = run_attention_again(module, args, kwargs, wide[0], num)
        if found is not None:
            return found
    if opens(module):
        again_args, again_kwargs = tree_unflatten(leaves, spec)
        return run_recurrent_again(module, again_args, again_kwargs, wide, num, kept)
    if isinstance(module, nn.RNNBase) and (len(args) > 1 or kwargs):
        raise ValueError(
            f"{type(module).__name__} with projections, or with weights made of others, is called with a state, which "
            "is not laid out example by example; let it begin with none, or freeze it"
        )
    params = {name: widened(p) for name, p in module.named_parameters() if p.requires_grad}
    others = {name: widened(p) for name, p in module.named_parameters() if not p.requires_grad}
    others |= {name: widened(buffer) for name, buffer in module.named_buffers()}
    cotangents = [grad.unflatten(0, (num, -1)) for grad in wide if grad is not None]
    length = cotangents[0].shape[:2].numel()
    mapped = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == length for leaf in leaves]
    fixed = {"attn_mask": kwargs["attn_mask"]} if "attn_mask" in kwargs else {}

    def pullback(examples: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        rest = iter(examples)
        one = [next(rest) if is_mapped else leaf for leaf, is_mapped in zip(leaves, mapped, strict=True)]
        one_args, one_kwargs = tree_unflatten(one, spec)
        if isinstance(module, nn.RNNBase):
            one_args = (*one_args, _initial_state(module, one_args[0]))

        def outputs(params: dict[str, Tensor]) -> list[Tensor]:
            result = functional_call(module, (params, others), one_args, one_kwargs | fixed)
            found = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
            return [leaf for leaf, grad in zip(found, wide, strict=True) if grad is not None]

        pull: Any = vjp(outputs, params)[1]
        gradient: dict[str, Tensor] = pull(cotangents)[0]
        return gradient

    examples = [leaf.unflatten(0, (num, -1)) for leaf, is_mapped in zip(leaves, mapped, strict=True) if is_mapped]
    # What is fastest for a batch knows no batch of batches.
    before = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            rows = vmap(pullback)(examples, cotangents)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)
    return {name: Rows(row.flatten(1)) for name, row in rows.items()}


def widened(tensor: Tensor) -> Tensor:
    """Half precision, as autocast leaves it, is too little to differentiate with."""
    if not tensor.is_floating_point():
        return tensor.detach()
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _initial_state(module: nn.RNNBase, x: Tensor) -> Any:
    """Zeros, as without a state; but of this example, where those the module makes would belong to none."""
    layers = module.num_layers * (2 if module.bidirectional else 1)
    zero = 0 * x.flatten()[0]
    h = zero + x.new_zeros(layers, len(x), getattr(module, "proj_size", 0) or module.hidden_size)
    return (h, zero + x.new_zeros(layers, len(x), module.hidden_size)) if isinstance(module, nn.LSTM) else h


def _bias(module: Any, b_NTq: Tensor) -> LayerFactors:
    return {} if module.bias is None else {"bias": Summed(b_NTq)}


def _scale_and_shift(scaled: Tensor, grad: Tensor, numel: int, num: int) -> LayerFactors:
    return {
        "weight": Summed(scaled.reshape(num, -1, numel)),
        "bias": Summed(grad.reshape(num, -1, numel)),
    }


def _summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims) if dims else x

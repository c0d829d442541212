"""Any layer that treats its examples one by one: it runs again, example by example, with `torch.func`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cdgrab.factors import Rows
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors, Unseen, widened


class OneByOne(LayerAdapter):
    """Serves any layer.

    An argument whose first dimension is as long as that of the outputs is split by examples. All examples share the
    others, and `attn_mask`.
    """

    runs_again = True

    def factors_again(
        self, module: nn.Module, args: Any, kwargs: Any, grads: list[Tensor | None], num: int
    ) -> LayerFactors:
        shared = {key: value for key, value in kwargs.items() if key == "attn_mask"}
        others = {key: value for key, value in kwargs.items() if key not in shared}
        leaves, spec = tree_flatten(widened((args, others)))
        cotangents = [grad.unflatten(0, (num, -1)) for grad in grads if grad is not None]
        length = cotangents[0].shape[:2].numel()
        mapped = [isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == length for leaf in leaves]
        trained, fixed = _tensors_of(module)

        def pullback(examples: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
            rest = iter(examples)
            one = [next(rest) if is_mapped else leaf for leaf, is_mapped in zip(leaves, mapped, strict=True)]
            one_args, one_kwargs = tree_unflatten(one, spec)
            one_args = self.args_of_one(module, one_args)

            def outputs(trained: dict[str, Tensor]) -> list[Tensor]:
                result = functional_call(module, (trained, fixed), one_args, one_kwargs | shared)
                found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                return [leaf for leaf, grad in zip(found, grads, strict=True) if grad is not None]

            pull: Any = vjp(outputs, trained)[1]
            gradient: dict[str, Tensor] = pull(cotangents)[0]
            return gradient

        examples = [leaf.unflatten(0, (num, -1)) for leaf, is_mapped in zip(leaves, mapped, strict=True) if is_mapped]
        try:
            with _batchable_kernels():
                rows = vmap(pullback)(examples, cotangents)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            first_line = str(error).partition("\n")[0]
            raise Unseen(f"{type(module).__name__} cannot run example by example: {first_line}") from error
        return {name: Rows(row.flatten(1)) for name, row in rows.items()}

    def args_of_one(self, module: Any, args: Any) -> Any:  # noqa: ARG002
        """The arguments of the module for one example, a batch of one."""
        return args


def _tensors_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable parameters, and all other parameters and buffers, both at least in single precision."""
    wide = {name: widened(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    trained = {name: wide.pop(name) for name, parameter in module.named_parameters() if parameter.requires_grad}
    return trained, wide


@contextmanager
def _batchable_kernels() -> Iterator[None]:
    """A context without oneDNN, cuDNN and fused attention, whose kernels `vmap` cannot batch."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)

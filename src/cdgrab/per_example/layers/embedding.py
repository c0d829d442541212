"""Embeddings: the indices and the output gradient are the factors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdgrab.factors import Lookup
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors


class EmbeddingAdapter(LayerAdapter):
    """Serves `Embedding`."""

    parameters = ("weight",)

    def matrices(self, module: nn.Embedding) -> tuple[str, ...]:  # noqa: ARG002
        return ("weight",)

    def factors(self, module: nn.Embedding, x: Tensor, grad: Tensor, num: int) -> LayerFactors:
        index_NT, b_NTq = x.reshape(num, -1), grad.reshape(num, -1, grad.shape[-1])
        if module.padding_idx is not None:
            b_NTq = torch.where((index_NT == module.padding_idx)[..., None], 0.0, b_NTq)
        if module.scale_grad_by_freq:  # by how often the batch has each index
            b_NTq = b_NTq / torch.bincount(index_NT.flatten(), minlength=module.num_embeddings)[index_NT][..., None]
        return {"weight": Lookup(index_NT, b_NTq, module.num_embeddings)}

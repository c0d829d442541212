"""Ray Train: a loader prepared in a balanced order, within the loop of a `TorchTrainer`."""

from __future__ import annotations

from typing import Any

import ray.train.torch
from torch import nn
from torch.utils.data import DataLoader

from cdgrab.loaders import ordered
from cdgrab.ordering import Ordering


def balance(
    model: nn.Module, loader: DataLoader[Any], *, accumulate: int = 1, source: Any = "auto", **options: Any
) -> tuple[Ordering, DataLoader[Any]]:
    """An ordering found from the gradients of `model`, and `loader` prepared by Ray in its order.

    It takes the place of `ray.train.torch.prepare_data_loader(loader)`. Checkpoints take the ordering, whose
    `state_dict` all workers call; after a restart every worker loads it, and goes on at the batch where it was taken.

    Args:
        model: What `ray.train.torch.prepare_model` returned.
        loader: The loader as it is before it is prepared.
        accumulate: As for `cdgrab.ordered`.
        source: As for `Ordering.attach`.
        options: Further arguments of `Ordering`.
    """
    ordering, own = ordered(loader, accumulate=accumulate, **options)
    ordering.attach(model, source=source)
    prepared: DataLoader[Any] = ray.train.torch.prepare_data_loader(own)
    return ordering, prepared


__all__ = ["balance"]

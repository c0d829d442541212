"""Hugging Face Accelerate: a prepared loader in a balanced order.

A prepared loader deals out the batches of another among ranks. Here that loader is replaced, inside the prepared one,
by a loader of this rank's own batches, so that nothing is dealt out twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch import nn

from cdgrab.integrations.batches import OwnBatches, own_batches
from cdgrab.loaders import check_dataset, recipe_of
from cdgrab.ordering import Ordering


def balance(
    accelerator: Accelerator, model: nn.Module, loader: Any, *, source: Any = "auto", **options: Any
) -> Ordering:
    """Put a prepared loader into a balanced order found from the gradients of `model`; return the ordering.

    The ordering is saved and loaded with `accelerator.save_state()` and `load_state()`, at any batch. After loading,
    the loader goes on with the rest of the epoch. `skip_first_batches` may be used or left out.

    Args:
        accelerator: Which has prepared both.
        model: The prepared model.
        loader: The prepared loader. It is changed in place.
        source: As for `Ordering.attach`.
        options: Further arguments of `Ordering`.
    """
    ordering = reorder(loader, accumulate=accelerator.gradient_accumulation_steps, **options)
    ordering.attach(model, source=source)
    accelerator.register_for_checkpointing(ordering)
    return ordering


def reorder(loader: Any, *, accumulate: int = 1, fetched: int = 1, **options: Any) -> Ordering:
    """Make an ordering for a prepared loader, and put the loader into its order.

    Args:
        loader: The prepared loader. It is changed in place.
        accumulate: Batches whose gradients are accumulated.
        fetched: Batches that the loop asks for before it trains on them.
        options: Further arguments of `Ordering`.
    """
    check_dataset(getattr(loader, "dataset", None))
    if type(loader) is not DataLoaderShard:
        raise ValueError(
            f"the loader is a {type(loader).__name__}; expected one that accelerator.prepare() returned, without "
            "dispatch_batches=True (one process would read for all)"
        )
    base = loader.base_dataloader
    if isinstance(base, OwnBatches):
        raise ValueError("the loader is in a balanced order already; use the ordering that it was given")
    if hasattr(base, "state_dict"):
        raise ValueError(
            "the loader keeps a position of its own (use_stateful_dataloader=True); leave that out: the ordering "
            "knows what is left of an epoch"
        )
    shard = base.batch_sampler
    recipe = recipe_of(base, batches=getattr(shard, "batch_sampler", shard))
    if getattr(shard, "split_batches", False):
        recipe = replace(recipe, batch_size=recipe.batch_size // shard.num_processes)
    ordering = recipe.ordering(accumulate, **options)
    loader.base_dataloader = own_batches(recipe, ordering, fetched)
    return ordering


__all__ = ["balance", "reorder"]

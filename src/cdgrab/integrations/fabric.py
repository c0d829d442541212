"""Lightning Fabric: a loader set up in a balanced order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from cdgrab.integrations.batches import own_batches
from cdgrab.loaders import recipe_of
from cdgrab.ordering import Ordering

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def balance(
    fabric: Fabric, model: nn.Module, loader: Any, *, accumulate: int = 1, source: Any = "auto", **options: Any
) -> tuple[Ordering, Any]:
    """An ordering found from the gradients of `model`, and `loader` set up by Fabric in its order.

    It takes the place of `fabric.setup_dataloaders(loader)`, which sets epochs by a count that starts anew in every
    process. `fabric.save` and `fabric.load` take the ordering in their state, at any batch.

    Args:
        fabric: Fabric, launched.
        model: What `fabric.setup` returned.
        loader: The loader as it is before it is set up.
        accumulate: As for `cdgrab.ordered`.
        source: As for `Ordering.attach`.
        options: Further arguments of `Ordering`.
    """
    recipe = recipe_of(loader)
    ordering = recipe.ordering(accumulate, **options)
    ordering.attach(model, source=source)
    own = own_batches(recipe, ordering)
    return ordering, fabric.setup_dataloaders(own, use_distributed_sampler=False)


__all__ = ["balance"]

"""Hugging Face Accelerate: a prepared loader in a balanced order.

A prepared loader deals out the batches of another among ranks. Here that loader is replaced, inside the prepared one,
by a loader of this rank's own batches, so that nothing is dealt out twice.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader, Sampler

from cdgrab.integrations.ranks import AllRanks
from cdgrab.loaders import check_dataset, recipe_of
from cdgrab.ordering import Ordering

log = logging.getLogger("cdgrab")


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
    accelerator.register_for_checkpointing(AllRanks(ordering))
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
    if isinstance(base, _OwnBatches):
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
    waiting = fetched + max(0, ordering.unit_size // ordering.batch_size - 1)
    waiting += recipe.options["num_workers"] * (recipe.options["prefetch_factor"] or 0)
    batches = OrderedBatches(ordering, waiting)
    loader.base_dataloader = _OwnBatches(recipe.dataset, batch_sampler=batches, **recipe.options)
    return ordering


class OrderedBatches(Sampler[list[Any]]):
    """The batches of this rank in the order of an ordering.

    The loader iterates it for the rest of the epoch. Whoever else does (`skip_first_batches`) counts from the start of
    the epoch: the batches that have been observed are then stand-ins, which must not be loaded.

    It has no attribute `sampler`: Accelerate would set epochs by a count that starts anew in every process.

    Attributes:
        direct: Whether the loader itself is about to iterate.
        num_processes: By which the total batch size is computed.
    """

    def __init__(self, ordering: Ordering, waiting: int) -> None:
        self._ordering, self._waiting = ordering, waiting
        self.batch_size, self.drop_last = ordering.batch_size, ordering.drop_last
        self.num_processes = ordering.world.size
        self.direct = False
        self._pass = (0, 0, 0)  # the epoch, examples left when it began, examples dealt since

    def __len__(self) -> int:
        return -(-self._ordering.examples_per_epoch // self.batch_size)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._rest() if self.direct else self._all()

    def _all(self) -> Iterator[list[Any]]:
        ordering = self._ordering
        visited = (ordering.examples_per_epoch - ordering.examples_left) // self.batch_size
        for batch in range(visited):
            yield _Visited(ordering.epoch, batch, visited)
        yield from self._rest()

    def _rest(self) -> Iterator[list[Any]]:
        ordering, size = self._ordering, self.batch_size
        waiting = self._check_observed()
        if waiting:
            log.warning(
                "epoch %d: %d examples that were dealt before have not been observed, and come now. If the last pass "
                "was not interrupted, skip_first_batches left out batches that no step had observed",
                ordering.epoch,
                waiting,
            )
        self._pass, indices = (ordering.epoch, ordering.examples_left, 0), iter(ordering.sampler)
        while batch := list(itertools.islice(indices, size)):
            epoch, left, dealt = self._pass
            self._pass = (epoch, left, dealt + len(batch))
            yield batch
            self._check_observed()

    def _check_observed(self) -> int:
        """The examples of this pass whose gradients are missing, if some are here.

        Raises `RuntimeError` if these are more than a loop can have fetched ahead.
        """
        ordering, (epoch, left, dealt) = self._ordering, self._pass
        observed = left - ordering.examples_left if ordering.epoch == epoch else left
        if 0 < observed < dealt - self._waiting * self.batch_size:
            raise RuntimeError(
                f"epoch {epoch}: this rank was dealt {dealt} examples, and {observed} were observed, so gradients go "
                "to the wrong examples. Either skip_first_batches left out batches that no step had observed, or "
                "batches are dealt out among ranks once more, or some have no backward pass"
            )
        return dealt - observed if observed > 0 else 0


class _Visited(list[Any]):
    """Stands for a batch that has been observed already. Whoever loads it is told so."""

    def __init__(self, epoch: int, batch: int, visited: int) -> None:
        self._arguments = epoch, batch, visited

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        epoch, batch, visited = self._arguments
        raise RuntimeError(
            f"batch {batch} of epoch {epoch} was trained on before the state was saved; pass {visited} to "
            "skip_first_batches, or leave it out: the loader goes on where the state was saved"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Visited, self._arguments  # to a worker, without being iterated


class _OwnBatches(DataLoader[Any]):
    """A loader of the batches of one rank. It says when it is the loader itself that iterates them."""

    def __iter__(self) -> Any:
        assert isinstance(self.batch_sampler, OrderedBatches)
        self.batch_sampler.direct = True
        try:
            return super().__iter__()
        finally:
            self.batch_sampler.direct = False


__all__ = ["OrderedBatches", "balance", "reorder"]

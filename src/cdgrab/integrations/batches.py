"""The batches of one rank for tools that wrap loaders, deal out batches among ranks, or count epochs by themselves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from cdgrab.loaders import Recipe
from cdgrab.ordering import Ordering

log = logging.getLogger("cdgrab")


def own_batches(recipe: Recipe, ordering: Ordering, fetched: int = 1) -> DataLoader[Any]:
    """The loader again, in the order of `ordering`, so that no tool sets its epoch.

    Args:
        recipe: What the loader was made from.
        ordering: The ordering.
        fetched: Batches that the loop asks for before it trains on them.
    """
    waiting = fetched + max(0, ordering.unit_size // ordering.batch_size - 1)
    waiting += recipe.options["num_workers"] * (recipe.options["prefetch_factor"] or 0)
    return OwnBatches(recipe.dataset, batch_sampler=OrderedBatches(ordering, waiting), **recipe.options)


class OrderedBatches(Sampler[list[Any]]):
    """The batches of this rank in the order of an ordering.

    The loader iterates it for the rest of the epoch. Whoever else does (`skip_first_batches`) counts from the start of
    the epoch: the batches that have been observed are then stand-ins, which must not be loaded.

    It has no attribute `sampler`: Accelerate and Fabric set epochs by a count that starts anew in every process.

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


class OwnBatches(DataLoader[Any]):
    """A loader of the batches of one rank. It says when it is the loader itself that iterates them."""

    def __iter__(self) -> Any:
        assert isinstance(self.batch_sampler, OrderedBatches)
        self.batch_sampler.direct = True
        try:
            return super().__iter__()
        finally:
            self.batch_sampler.direct = False


__all__ = ["OwnBatches", "own_batches"]

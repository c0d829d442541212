"""The sampler that `DataLoader` gets. Iterating changes nothing; the ordering behind it is what moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, DistributedSampler

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering


class OrderedSampler(DistributedSampler[Any]):
    """A `DistributedSampler` whose order comes from an `Ordering`; made by it, as `ordering.sampler`.

    It is a subclass so that frameworks which swap in their own sampler for distributed runs leave it alone.

    Iterating yields what is left of the current epoch: all of it, unless rows have been observed since the epoch
    began. So a loop that was broken off goes on where it stopped, and a resumed run likewise, while a pass that
    observes nothing (evaluation, a look at one batch) leaves no trace. To begin the next epoch early, call `set_epoch`.
    """

    def __init__(self, ordering: Ordering, dataset: Dataset[Any] | range) -> None:
        world = ordering.world
        replicas, rank = (1, 0) if world.one_process else (world.size, world.rank)
        # The type of `dataset` is widened: only its length is ever asked for.
        super().__init__(dataset, replicas, rank, seed=ordering.seed, drop_last=ordering.drop_last)  # type: ignore[arg-type]
        self._ordering = ordering
        self.num_samples = ordering.examples_per_epoch
        self.total_size = self.num_samples * replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._ordering.remaining().tolist())

    def __len__(self) -> int:
        return self._ordering.examples_left

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, as with any `DistributedSampler`. Does nothing if it is the current one.

        Optional where every batch is observed: the epoch then ends by itself with its last row. Needed after
        a loop that was broken off for good, with a loader that drops its last batch, and for orders without gradients
        when nothing is observed.
        """
        self._ordering.set_epoch(epoch)


__all__ = ["OrderedSampler"]

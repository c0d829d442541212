"""The sampler for `DataLoader`. Iterating changes nothing; only observed rows advance the ordering behind it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, DistributedSampler

from cdgrab.deliveries import Deliveries
from cdgrab.fields import Fields
from cdgrab.settings import Settings

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering

log = logging.getLogger("cdgrab")


class OrderedSampler(DistributedSampler[Any]):
    """A `DistributedSampler` whose order comes from an `Ordering`; made by it, as `ordering.sampler`.

    It is a subclass so that frameworks which insert their own sampler in distributed runs leave it alone.

    Iterating yields the rest of the current epoch: all of it, unless rows have been observed since the epoch began. So
    an interrupted loop, or a resumed run, continues where it stopped. A pass that observes nothing (an evaluation, a
    look at one batch) leaves no trace. To begin the next epoch early, call `set_epoch`.
    """

    def __init__(
        self, ordering: Ordering, settings: Settings, dataset: Dataset[Any] | range, deliveries: Deliveries
    ) -> None:
        world = ordering.world
        # The type of `dataset` is widened: only its length is used.
        self._ordering, self._settings, self._deliveries = ordering, settings, deliveries
        super().__init__(dataset, world.size, world.rank, seed=ordering.seed, drop_last=ordering.drop_last)  # type: ignore[arg-type]
        self._stood_at: list[tuple[int, int]] = []
        self._resumed: tuple[int, int] | None = None  # where a loader says that it stood

    def __iter__(self) -> Iterator[int]:
        self._settings.check_world_is_the_same()
        self._notice_a_standstill()
        left = self._ordering.remaining()
        left = left[self._to_skip() :]
        delivery = self._deliveries.begin(self._ordering.epoch, self.num_samples - len(left), left)
        return itertools.chain.from_iterable(delivery)

    def state_dict(self) -> dict[str, int]:
        """How far the latest iterator is, for loaders that save their own state. It does not replace the ordering's."""
        given = self._deliveries.latest
        if given is None or (given.epoch, given.place) < self._observed():
            return dict(zip(("epoch", "place"), self._observed(), strict=True))
        return {"epoch": given.epoch, "place": given.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Expect to stand where a loader stood. The next iterator raises `ValueError` if the ordering does not."""
        found = Fields(state)
        epoch, place = found.whole("epoch"), found.whole("place")
        self._resumed = (epoch + 1, 0) if place >= self.num_samples else (epoch, place)

    def _observed(self) -> tuple[int, int]:
        """The epoch, and how many of its examples have been observed."""
        return self._ordering.epoch, self.num_samples - self._ordering.examples_left

    def _to_skip(self) -> int:
        """The number of examples that a resumed loader has delivered, and nobody had to observe."""
        resumed, self._resumed = self._resumed, None
        (epoch, place), orders_freely = self._observed(), not self._settings.spec.needs_gradients
        if resumed is None or resumed == (epoch, place):
            return 0
        if orders_freely and resumed[0] == epoch and place == 0:
            return resumed[1]
        raise ValueError(
            f"the loader was saved in epoch {resumed[0]} after {resumed[1]} examples, and the ordering stands in epoch "
            f"{epoch} after {place}; load the state that the ordering had at the same step, too (and leave "
            "snapshot_every_n_steps of the loader at 1), or the state of the ordering alone"
        )

    def __len__(self) -> int:
        """The number of examples in a whole epoch: `len(loader)` must not change while a loop uses it."""
        return self.num_samples

    @property
    def num_samples(self) -> int:
        """The number of examples in a whole epoch of this process."""
        return self._ordering.examples_per_epoch

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        """Do nothing: `DistributedSampler.__init__` sets it."""

    @property
    def total_size(self) -> int:
        """The number of examples in a whole epoch of all processes."""
        return self.num_samples * self._settings.world.size

    @total_size.setter
    def total_size(self, value: int) -> None:
        """Do nothing: `DistributedSampler.__init__` sets it."""

    @property
    def epoch(self) -> int:
        """The epoch of the ordering."""
        return self._ordering.epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        """Do nothing: `DistributedSampler.__init__` sets it; only `set_epoch` begins an epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, as with any `DistributedSampler`. Does nothing if it is the current one.

        Optional if every batch is observed: the epoch then ends with its last row. Needed to abandon the rest of an
        epoch, with a loader that drops its last batch, and for orders without gradients when nothing is observed.
        """
        self._ordering.set_epoch(epoch)

    def _notice_a_standstill(self) -> None:
        """Warn, then raise `RuntimeError`, if passes keep beginning with less than a batch left.

        A loader that drops its last batch never delivers the end of the epoch: every further pass would be empty, in
        silence. One or two such passes may be evaluations just before the last batch, or an interrupted loop, hence
        warnings first. Orders do not depend on what is kept here.
        """
        ordering = self._ordering
        here = (ordering.epoch, ordering.examples_left)
        latest = self._deliveries.latest
        if latest is not None and not latest.begun:
            return  # loaders that restore a state make iterators of which they take nothing
        if not 0 < ordering.examples_left < min(ordering.batch_size, ordering.examples_per_epoch):
            return
        self._stood_at = [*self._stood_at, here] if here in self._stood_at else [here]
        message = (
            f"a pass over the data begins while epoch {ordering.epoch} has {ordering.examples_left} examples left, "
            "fewer than a batch. If the loader drops its last batch, make the ordering with drop_last=True; if the "
            f"last pass was interrupted, begin the next epoch with sampler.set_epoch({ordering.epoch + 1})"
        )
        if len(self._stood_at) > 2:
            raise RuntimeError(message)
        log.warning(message)


__all__ = ["OrderedSampler"]

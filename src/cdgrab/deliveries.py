"""Compares what the sampler has handed out with what was observed: where they differ, gradients go to wrong examples.

A loader with another batch size than the ordering's, accumulation that was not declared, an extra or a missing backward
pass, a sampler that nobody iterates: training goes on, and without this check nothing would be said.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator

from cdgrab.lanes import IntArray
from cdgrab.settings import Settings

log = logging.getLogger("cdgrab")

_AT_A_TIME = 1 << 16
# A loop may be interrupted, and workers fetch ahead: so many batches may have been delivered for nothing.
_FETCHED_AHEAD = 16


class Delivery:
    """The examples that an iterator gives, some at a time: a list of all of them would take several times the memory.

    Attributes:
        epoch: The epoch they belong to.
        start: How many examples of the epoch came before.
        ended: Whether the iterator was asked for more than there is.
    """

    def __init__(self, epoch: int, start: int, examples: IntArray) -> None:
        self.epoch, self.start, self.ended = epoch, start, False
        self._examples, self._end = examples, start
        self._part: Iterator[int] = iter([])

    @property
    def place(self) -> int:
        """How many examples of the epoch have been given. The iterator knows what is left, so nobody has to count."""
        return self._end - operator.length_hint(self._part)

    @property
    def begun(self) -> bool:
        """Whether any example has been given."""
        return self._end > self.start

    def __iter__(self) -> Iterator[Iterator[int]]:
        for start in range(0, len(self._examples), _AT_A_TIME):
            part = self._examples[start : start + _AT_A_TIME].tolist()
            self._part = iter(part)
            self._end += len(part)
            yield self._part
        self.ended = True


class Deliveries:
    """All iterators of the sampler in the epoch under way.

    Args:
        settings: Those of the ordering, for figures in messages.

    Attributes:
        latest: The latest iterator of any epoch.
        by_hand: Whether somebody asked for the order of this epoch without the sampler, and may deal it out by hand.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._of_epoch: list[Delivery] = []
        self._unasked = 0  # epochs in a row that were observed, though nobody had asked for their order
        self.latest: Delivery | None = None
        self.by_hand = False

    def begin(self, epoch: int, observed: int, left_L: IntArray) -> Delivery:
        """Begin a pass, after comparing the one before; `observed` examples of the epoch have been observed."""
        self._check_last_pass(epoch, observed)
        self.latest = Delivery(epoch, observed, left_L)
        self._of_epoch = [*(one for one in self._of_epoch if one.epoch == epoch), self.latest]
        self.by_hand = False
        return self.latest

    def check_step(self, epoch: int, observed: int) -> None:
        """Raise `RuntimeError` if more has been observed in this epoch than was handed out."""
        if self.by_hand or not self._of_epoch or self._of_epoch[0].epoch != epoch:
            return
        given = max(one.place for one in self._of_epoch)
        if observed > given:
            raise RuntimeError(
                f"epoch {epoch}: gradients of {observed} examples have been observed on rank "
                f"{self._settings.world.rank}, and the sampler has handed out {given}. Either there was more than one "
                f"backward pass for a batch, or the batches of the loader are smaller than {self._batch()}"
            )

    def end_epoch(self, epoch: int, *, attached: bool) -> None:
        """Warn, then raise `RuntimeError`, if an attached model trains without the order being asked for."""
        asked = self.by_hand or any(one.epoch == epoch for one in self._of_epoch)
        self._unasked = 0 if asked or not attached else self._unasked + 1
        self.by_hand = False
        if not self._unasked:
            return
        message = (
            f"all gradients of epoch {epoch} were observed, but nothing asked for its order: the loader visits "
            "examples in another one. Pass it sampler=ordering.sampler, or use cdgrab.ordered(loader), and let no tool "
            "replace the sampler"
        )
        if self._unasked > 1:
            raise RuntimeError(message)
        log.warning(message)

    def _check_last_pass(self, epoch: int, observed: int) -> None:
        """Warn if the last pass of this epoch came to its end, and some of it was not observed; raise if much was."""
        last = self.latest
        if last is None or not last.ended or last.epoch != epoch or not last.start < observed < last.place:
            return
        missing, batch = last.place - observed, self._settings.batch_size
        message = (
            f"epoch {epoch}: the last pass delivered {last.place - last.start} examples, and gradients of "
            f"{observed - last.start} were observed"
        )
        if missing <= _FETCHED_AHEAD * batch:
            log.warning(
                "%s. If it was not interrupted, a batch had no backward pass, and gradients since then went to the "
                "wrong examples",
                message,
            )
            return
        raise RuntimeError(
            f"{message}, so gradients went to the wrong examples. Either the batches of the loader are larger than "
            f"{self._batch()}, or gradients are accumulated over batches and a unit is one batch (unit_size), or "
            "batches had no backward pass. cdgrab.ordered(loader, accumulate=...) takes these figures from the loader"
        )

    def _batch(self) -> str:
        return f"batch_size={self._settings.batch_size} of the ordering"

"""Figures of an epoch: the cost of ordering, and the counts of the balancers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cdgrab.balancing.tally import Tally
from cdgrab.fields import Fields

log = logging.getLogger("cdgrab")


class Meter:
    """Measures the time spent on the epoch under way, and keeps the figures of the last finished one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.balanced = 1.0  # share of the trained numbers
        self.figures = dict(_NONE)
        self._bytes_before = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A context whose duration counts as time spent on ordering, unless it raises."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def finish(self, epoch: int, tallies: list[Tally], unobserved: int, bytes_sent: int) -> None:
        """Keep the figures of `epoch`, which has ended; `bytes_sent` counts from the first epoch on."""
        sent, self._bytes_before = bytes_sent - self._bytes_before, bytes_sent
        self.figures = summarise(
            epoch, tallies, unobserved=unobserved, seconds=self.seconds, bytes_sent=sent, balanced=self.balanced
        )
        rows, left_out = self.figures["rows"], self.figures["nonfinite"]
        if rows > left_out and all(tally.sum_lengths == 0 for tally in tallies):
            log.warning(
                "epoch %d: the squared length of every gradient, or difference of two, is zero, so nothing was "
                "balanced; if gradients are not zero but small (below 1e-19 in single precision), scale the loss up",
                epoch,
            )
        if left_out:
            log.warning(
                "epoch %d: %d gradients or pairs of them were not finite; they were left out and their units kept "
                "their order",
                epoch,
                left_out,
            )


def summarise(
    epoch: int, tallies: list[Tally], *, unobserved: int, seconds: float, bytes_sent: int, balanced: float
) -> dict[str, float]:
    """The figures as a flat dictionary with the same keys for every order; `Ordering.metrics` explains them."""
    rows = sum(tally.rows for tally in tallies)
    moved = [tally for tally in tallies if tally.sum_lengths > 0]
    imbalances = [math.sqrt(max(0.0, tally.max_norm2) / tally.sum_lengths) for tally in moved]
    return {
        "epoch": epoch,
        "rows": rows,
        "imbalance": sum(imbalances) / len(imbalances) if imbalances else math.nan,
        "flipped": sum(tally.flipped for tally in tallies) / rows if rows else math.nan,
        "nonfinite": sum(tally.nonfinite for tally in tallies),
        "unobserved": unobserved,
        "seconds": seconds,
        "bytes": bytes_sent,
        "balanced": balanced,
    }


_NONE = summarise(-1, [], unobserved=0, seconds=0.0, bytes_sent=0, balanced=1.0)


def loaded_figures(state: Fields) -> dict[str, float]:
    """The figures that were saved."""
    whole = {key for key, value in _NONE.items() if type(value) is int}
    return {key: state.whole(key, least=-(key == "epoch")) if key in whole else state.number(key) for key in _NONE}

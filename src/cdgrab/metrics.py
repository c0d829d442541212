"""Figures of an epoch, from what the balancers counted along the way."""

from __future__ import annotations

import math

from cdgrab.balance.tally import Tally


def summarise(
    epoch: int, tallies: list[Tally], *, unobserved: int, seconds: float, bytes_sent: int
) -> dict[str, float]:
    """One flat dictionary, the same keys for every order; see `Ordering.metrics` for their meaning."""
    rows = sum(tally.rows for tally in tallies)
    balanced = [tally for tally in tallies if tally.sum_lengths > 0]
    imbalances = [math.sqrt(max(0.0, tally.max_norm2) / tally.sum_lengths) for tally in balanced]
    return {
        "epoch": epoch,
        "rows": rows,
        "imbalance": sum(imbalances) / len(imbalances) if imbalances else math.nan,
        "flipped": sum(tally.flipped for tally in tallies) / rows if rows else math.nan,
        "nonfinite": sum(tally.nonfinite for tally in tallies),
        "unobserved": unobserved,
        "seconds": seconds,
        "bytes": bytes_sent,
    }

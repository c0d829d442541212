"""The figures of an ordering under the names that loggers see, and one line per epoch for a writer."""

from __future__ import annotations

from cdgrab.ordering import Ordering


def figures(ordering: Ordering) -> dict[str, float]:
    """`ordering.metrics()` with the prefix `cdgrab/`; empty before the first epoch has ended."""
    found = ordering.metrics()
    return {f"cdgrab/{name}": float(value) for name, value in found.items()} if found["epoch"] >= 0 else {}


__all__ = ["figures"]

"""What compiled gradients of the tasks share."""

from __future__ import annotations

import functools
import importlib.util

# Sums may be reordered, which is what makes them fast. NaN stays NaN: hence not all of numba's `fastmath`.
REORDER = {"reassoc", "contract", "nsz", "arcp"}


@functools.cache
def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None

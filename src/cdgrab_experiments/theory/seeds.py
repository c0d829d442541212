"""Random generators: one for each purpose, independent of all others."""

from __future__ import annotations

import numpy as np


def generator(seed: int, *stream: int | str) -> np.random.Generator:
    """A generator that is the same for the same `seed` and `stream`."""
    words = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in stream]
    return np.random.default_rng([seed, *words])

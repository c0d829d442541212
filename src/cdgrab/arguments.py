"""What users may pass to an ordering, checked: what was found, what is accepted, what to do."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from cdgrab.world import World


def length_of(dataset: Any) -> int:
    """How many examples a dataset has; a number stands for itself."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an iterable-style dataset, whose order is its own; an ordering needs a "
            "map-style dataset, with __getitem__ and __len__"
        )
    if isinstance(dataset, Sized):
        length = len(dataset)
    elif isinstance(dataset, (int, np.integer)) and not isinstance(dataset, bool):
        length = int(dataset)
    else:
        raise ValueError(
            f"{type(dataset).__name__} has no length; pass a map-style dataset (with __len__) or a whole number"
        )
    if length < 1:
        raise ValueError(f"the dataset has {length} examples; there is nothing to order")
    return length


def whole_number(name: str, value: Any, *, least: int) -> int:
    """A whole number of any integer type, numpy's included."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not least <= number < 2**63:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    return number


def split_batch(batch_size: int, world: World) -> int:
    """Examples of one worker in a full batch."""
    if not world.one_process:
        return batch_size
    if batch_size % world.size:
        raise ValueError(
            f"batch_size is {batch_size}, which {world.size} simulated workers cannot share evenly; use a "
            f"multiple of {world.size}"
        )
    return batch_size // world.size


def checked_unit_size(unit_size: int | None, default: int | None, worker_batch: int) -> int:
    """Examples per unit: what was asked for, or `default`, or a worker's whole batch."""
    if unit_size is None:
        return default or worker_batch
    unit_size = whole_number("unit_size", unit_size, least=1)
    if worker_batch % unit_size and unit_size % worker_batch:
        raise ValueError(
            f"unit_size is {unit_size}, but a worker's batch is {worker_batch} examples; units and batches must not "
            f"straddle each other, so choose a divisor of {worker_batch}, or a multiple if batches are accumulated"
        )
    return unit_size

"""Checks of what users pass to an ordering. An error says what was found, what is accepted and what to do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from cdgrab.world import World

Fingerprint = str | Callable[[Any], str] | None


def length_of(dataset: Any) -> int:
    """The number of examples in a dataset; an integer is returned as it is."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an iterable-style dataset, which sets its own order; pass a map-style "
            "dataset, with __getitem__ and __len__"
        )
    if isinstance(dataset, DataLoader):
        raise ValueError("a DataLoader was passed as the dataset; pass its dataset: Ordering(loader.dataset, ...)")
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{type(dataset).__name__} maps names to datasets: {', '.join(map(repr, list(dataset)[:4]))}; pass one of "
            "its datasets"
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
        raise ValueError(f"the dataset has {length} examples; pass at least one")
    return length


def checked_fingerprint(fingerprint: Fingerprint, dataset: Any) -> str | None:
    """The string that tells this dataset from others; a function is called with the dataset."""
    found = fingerprint(dataset) if callable(fingerprint) else fingerprint
    if found is not None and not isinstance(found, str):
        raise ValueError(f"fingerprint is {found!r}; pass a string, or a function that returns one for the dataset")
    return found


def as_rows(rows: Any) -> Tensor:
    """`rows` as a dense tensor; a sequence of rows is stacked."""
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(row, Tensor) for row in rows):
        shapes = {tuple(row.shape) for row in rows}
        if len(shapes) > 1:
            raise ValueError(
                f"the rows have different shapes: {', '.join(map(str, sorted(shapes)))}; pass rows of one length"
            )
        rows = torch.stack(tuple(rows))
    try:
        found = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"observe() was given a {type(rows).__name__}; expected a tensor with a row of numbers for every unit"
        ) from error
    if found.layout != torch.strided:
        raise ValueError(f"rows are sparse ({found.layout}); pass rows.to_dense()")
    if found.is_meta:
        raise ValueError("rows are on the device 'meta', where tensors have no values; pass rows from a real device")
    return found


def whole_number(name: str, value: Any, *, least: int) -> int:
    """`value` as an int; raises `ValueError` unless it is a whole number, of any integer type, from `least` on."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not least <= number < 2**63:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    return number


def checked_unit_size(unit_size: int | None, batch_size: int) -> int:
    """The examples per unit: `unit_size`, by default one."""
    if unit_size is None:
        return 1
    unit_size = whole_number("unit_size", unit_size, least=1)
    if batch_size % unit_size and unit_size % batch_size:
        raise ValueError(
            f"unit_size is {unit_size}, but a batch has {batch_size} examples; choose a divisor of {batch_size}, or a "
            "multiple if batches are accumulated"
        )
    return unit_size


def checked_lanes(lanes: int | None, world: World, units_per_batch: int) -> int:
    """The number of lanes of all processes: `lanes`, or one for every unit of the global batch."""
    if lanes is None:
        return world.size * units_per_batch
    lanes = whole_number("lanes", lanes, least=1)
    if lanes % world.size or units_per_batch % (lanes // world.size):
        fitting = [str(world.size * n) for n in range(1, units_per_batch + 1) if units_per_batch % n == 0]
        raise ValueError(
            f"lanes is {lanes}, but the {world.size * units_per_batch} units of the global batch must be shared evenly "
            f"by all lanes, and lanes by {world.size} processes; choose one of {', '.join(fitting)}, or another "
            "unit_size (1: a unit is an example)"
        )
    return lanes

"""A dataset that returns indices with its items, for loaders that deliver batches out of order."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


class Indexed(Dataset[tuple[int, T_co]]):
    """Returns `(index, item)` instead of `item`, so that rows can be named: `ordering.observe(rows, units=index)`.

    Example:
        >>> Indexed(["a", "b"])[1]
        (1, 'b')
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, T_co]:
        return index, self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

"""Reads values out of a saved state, and checks each of them before anybody uses it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_MOST = 2**62

Size = int | tuple[int, ...] | None


class Fields:
    """A dict out of a state. Every value is asked for by its type, range and length.

    A value that is missing or not what was asked for raises `ValueError`, which names the field.

    Args:
        values: The dict, or what is in its place.
        where: The name of the field that holds it.
        device: Where tensors are wanted.

    Example:
        >>> Fields({"rows": 3}).whole("rows", most=2)
        Traceback (most recent call last):
        ValueError: the state is damaged: rows is 3, expected a whole number from 0 to 2; load another checkpoint
    """

    values: dict[Any, Any]

    def __init__(self, values: Any, where: str = "", device: torch.device | str = "cpu") -> None:
        self._where, self._device = where, device
        if not isinstance(values, dict):
            raise damaged(f"{where or 'its content'} is {_shown(values)}, expected a dict")
        self.values = values

    def name(self, key: Any) -> str:
        """The full name of a field."""
        return f"{self._where}.{key}" if self._where else str(key)

    def refuse(self, key: Any, found: Any, expected: str) -> ValueError:
        """The error for a field with a wrong value."""
        return damaged(f"{self.name(key)} is {_shown(found)}, expected {expected}")

    def raw(self, key: Any) -> Any:
        """The value as it is."""
        if key not in self.values:
            raise damaged(f"{self.name(key)} is missing")
        return self.values[key]

    def whole(self, key: str, least: int = 0, most: int = _MOST) -> int:
        value = self.raw(key)
        if type(value) is not int or not least <= value <= most:
            limit = f"from {least} on" if most == _MOST else f"from {least} to {most}"
            raise self.refuse(key, value, f"a whole number {limit}")
        return value

    def number(self, key: str, least: float = -math.inf) -> float:
        """A number, which may be NaN if there is no least one."""
        value = self.raw(key)
        if type(value) not in (int, float) or (least > -math.inf and not value >= least):
            raise self.refuse(key, value, "a number" if least == -math.inf else f"a number from {least:g} on")
        return value  # type: ignore[no-any-return]

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if type(value) is not bool:
            raise self.refuse(key, value, "True or False")
        return value

    def text(self, key: str) -> str | None:
        """A string or None."""
        value = self.raw(key)
        if value is not None and type(value) is not str:
            raise self.refuse(key, value, "a string or None")
        return value

    def inside(self, key: Any) -> Fields:
        return Fields(self.raw(key), self.name(key), self._device)

    def each(self, key: str, count: int) -> list[Fields]:
        """The dicts of a list."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(key, value, f"a list of {count}")
        return [Fields(one, f"{self.name(key)}[{number}]", self._device) for number, one in enumerate(value)]

    def tensor(self, key: Any, *shape: Size, dtype: torch.dtype) -> Tensor:
        """A copy of a tensor. A size is a number, one of several, or None: any."""
        value = self.raw(key)
        fits = (
            isinstance(value, Tensor)
            and value.layout == torch.strided
            and (value.dtype == dtype or value.numel() == 0)
            and value.ndim == len(shape)
            and all(_fits(size, found) for size, found in zip(shape, value.shape, strict=True))
        )
        if not fits:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.refuse(key, value, f"a tensor of shape ({sizes}) and type {_name(dtype)}")
        found: Tensor = value.detach().to(self._device, dtype, copy=True, memory_format=torch.contiguous_format)
        return found

    def integers(self, key: str, *shape: Size, least: int, end: int) -> Tensor:
        """A copy of a tensor of whole numbers from `least` on, below `end`."""
        value = self.raw(key)
        kinds = (torch.int8, torch.int16, torch.int32, torch.int64)
        dtype = value.dtype if isinstance(value, Tensor) and value.dtype in kinds else torch.int64
        found = self.tensor(key, *shape, dtype=dtype)
        if found.numel() and not (least <= int(found.min()) and int(found.max()) < end):
            raise damaged(
                f"{self.name(key)} has numbers from {int(found.min())} to {int(found.max())}, expected {least} to "
                f"{end - 1}"
            )
        return found


def damaged(reason: str) -> ValueError:
    """The error for a state that cannot be used."""
    return ValueError(f"the state is damaged: {reason}; load another checkpoint")


def _fits(size: Size, found: int) -> bool:
    return size is None or found == size or (isinstance(size, tuple) and found in size)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {_name(value.dtype)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

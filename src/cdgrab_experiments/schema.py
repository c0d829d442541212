"""Dataclasses from JSON that may hold anything: every field has the type it is declared with, or an error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**53  # integers up to here are exact in JSON everywhere
_LONGEST = 1000  # characters; longer than any line on data that a task writes


def parse(text: str) -> Any:
    """JSON without what standard JSON does not have, and without nesting that exhausts the stack."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def build(kind: type[T], found: Any, *, null_is_nan: bool = False) -> T:
    """An instance of the dataclass `kind` with the fields in `found`.

    Args:
        kind: Its fields may be str, int, float, bool, unions with None, and dict[str, ...] of these.
        found: What was parsed; fields with defaults may be absent.
        null_is_nan: Whether null stands for NaN, which JSON does not know, where a float is expected.

    Raises:
        ValueError: What is wrong, and where.
    """
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {_shown(found)}")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if strange := sorted(found.keys() - known.keys()):
        raise ValueError(f"unknown fields {_shown(strange)}")
    if absent := sorted(needed - found.keys()):
        raise ValueError(f"the fields {', '.join(absent)} are absent")
    return kind(**{name: _value(name, hints[name], found[name], null_is_nan) for name in found})


def _value(name: str, hint: Any, value: Any, null_is_nan: bool) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is dict and isinstance(value, dict):
            inner = get_args(kind)[1]
            checked = {key: _value(f"{name}[{_shown(key)}]", inner, v, null_is_nan) for key, v in value.items()}
            return {_text(name, key): v for key, v in checked.items()}
        if kind is Any:
            return _plain(name, value)
        if kind is str and isinstance(value, str):
            return _text(name, value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return _whole(name, value)
        if kind is float:
            if value is None and null_is_nan:
                return math.nan
            if isinstance(value, int | float) and not isinstance(value, bool):
                return _number(name, value)
    raise ValueError(f"{name} is {_shown(value)}; expected {_named(hint)}")


def _plain(name: str, value: Any) -> Any:
    """What may be anything may still be no more than a list of objects of plain values."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return [_value(name, dict[str, str | bool | int | float | None], part, False) for part in value]
    return _value(name, str | bool | int | float | None, value, False)


def _text(name: str, value: str) -> str:
    if len(value) > _LONGEST:
        raise ValueError(f"{name} has {len(value):,} characters; at most {_LONGEST:,} are accepted")
    if not value.isprintable():
        raise ValueError(f"{name} is {_shown(value)}, which has characters that cannot be printed")
    return value


def _whole(name: str, value: int) -> int:
    if abs(value) > _LARGEST:
        raise ValueError(f"{name} is out of range")
    return value


def _number(name: str, value: float) -> float:
    if isinstance(value, int):
        return float(_whole(name, value))
    if not math.isfinite(value):
        raise ValueError(f"{name} is out of range")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _named(hint: Any) -> str:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return " or ".join(str(getattr(kind, "__name__", kind)) for kind in kinds)


def _shown(value: Any) -> str:
    text = ascii(value) if not isinstance(value, Mapping | list) or len(value) < 10 else type(value).__name__
    return text if len(text) < 60 else f"{text[:57]}..."

"""Damages states, and tells what becomes of them."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cdgrab import Ordering
from cdgrab.state import pack, unpack

State = dict[str, Any]


def flipped(state: State, random: random.Random) -> State:
    """One bit of the payload is another."""
    payload = bytearray(state["payload"])
    bit = random.randrange(8 * len(payload))
    payload[bit // 8] ^= 1 << bit % 8
    return {**state, "payload": bytes(payload)}


def truncated(state: State, random: random.Random) -> State:
    return {**state, "payload": state["payload"][: random.randrange(len(state["payload"]))]}


def edited(state: State) -> Iterator[tuple[str, State]]:
    """Every field replaced by what it cannot be, with a checksum that is right."""
    content = unpack(state).values
    for path in _paths(content):
        holder = _at(content, path[:-1])
        for wrong in _wrong(holder[path[-1]]):
            other = copy.deepcopy(content)
            _at(other, path[:-1])[path[-1]] = wrong
            yield f"{path} = {str(wrong)[:40]}", pack(other)
        if isinstance(holder, dict):
            other = copy.deepcopy(content)
            del _at(other, path[:-1])[path[-1]]
            yield f"{path} is missing", pack(other)


def around(state: State) -> Iterator[tuple[str, Any]]:
    """Whatever is not the dict that was saved."""
    others: tuple[Any, ...] = (None, [], "x", 3, b"", {}, {"version": 6}, {"payload": state["payload"]})
    yield from ((repr(wrong)[:20], wrong) for wrong in others)
    fields: dict[str, list[Any]] = {
        "version": [5, "6", None, -1, []],
        "payload": [None, 7, "x", b"", [], torch.zeros(3)],
    }
    yield from ((f"{key} = {value!r}", {**state, key: value}) for key, values in fields.items() for value in values)


def loads(make: Callable[[], Ordering], named: Iterator[tuple[str, Any]]) -> tuple[Counter[str], list[str]]:
    """How often a load was refused, silent or raw (an error that is not ours), and what was not refused."""
    found: Counter[str] = Counter()
    others = []
    ordering = make()
    before = ordering.rank_state_dict()["payload"]
    for name, state in named:
        kind = "refused"
        try:
            ordering.load_state_dict(state)
            kind, ordering = "silent", make()
        except ValueError as error:
            kind = kind if str(error).startswith("the state ") else f"raw ({error!r})"
        except Exception as error:
            kind = f"raw ({error!r})"
        if kind != "refused":
            others.append(f"{kind}: {name}")
        found[kind.split()[0]] += 1
    if ordering.rank_state_dict()["payload"] != before:
        others.append("changed")
    return found, others


def _paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _wrong(value: Any) -> list[Any]:
    """Values that a field with this one cannot have."""
    if isinstance(value, bool):
        return [None, "x", 1, 0, []]
    if isinstance(value, int):
        return [None, "x", -1, 1.5, True, 1 << 130, []]
    if isinstance(value, float):
        return [None, "x", True, [], torch.zeros(())]
    if isinstance(value, Tensor):
        found: list[Any] = [None, "x", 3, [], value[None], value.float().numpy().tolist()]
        if value.ndim:
            found += [torch.cat([value, value.new_zeros(3, *value.shape[1:])])]
        if value.numel():
            found += [value.to(torch.float16), value.to(torch.complex64), value.to_sparse() if value.ndim else None]
            found += [value[:-1]] if value.ndim else []
        return found
    if isinstance(value, str):
        return [7, [], None, "x"]
    return [7, "x", None if value is not None else {}, []] + ([value[:-1]] if isinstance(value, list) else [])

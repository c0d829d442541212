"""Packs a state for saving, and checks a saved one before it is loaded.

A state has two entries: a version, and bytes. Bytes do not change while somebody writes them, and one checksum covers
all of them. `torch.distributed.checkpoint`, which loads only into tensors of the right shape, takes them as they are.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch

from cdgrab.fields import Fields, damaged

VERSION = 6
_DIGEST = 16  # bytes of the checksum, which come first


def pack(content: dict[str, Any]) -> dict[str, Any]:
    """A state with this content: numbers, strings, tensors, and lists and dicts of them."""
    file = io.BytesIO()
    torch.save(content, file)
    body = file.getvalue()
    return {"version": VERSION, "payload": _checksum(body) + body}


def unpack(state: Any) -> Fields:
    """The content of a state, on the CPU; raises `ValueError` if it is none or damaged."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state of an ordering is the dict that state_dict() returned; found a {type(state).__name__}"
        )
    missing = {"version", "payload"} - state.keys()
    if "version" in state and state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']!r}, this release of cdgrab reads version {VERSION}; load it with "
            "the release that saved it"
        )
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(sorted(missing))}; pass the dict that Ordering.state_dict() returned"
        )
    payload = state["payload"]
    if not isinstance(payload, bytes) or _checksum(payload[_DIGEST:]) != payload[:_DIGEST]:
        raise damaged("its payload is not what was saved, or only a part of it")
    try:
        return Fields(torch.load(io.BytesIO(payload[_DIGEST:]), weights_only=True, map_location="cpu"))
    except Exception as error:
        raise damaged(f"its payload cannot be read ({error})") from error


def check_config(saved: Fields, config: dict[str, Any]) -> None:
    """Raise `ValueError` unless the values that a state was saved with are those of the ordering."""
    for field, expected in config.items():
        found = saved.raw(field)
        if type(found) is not type(expected) or found != expected:
            raise ValueError(
                f"the state was saved with {field}={found!r}, this ordering has {field}={expected!r}; make the "
                "ordering with the saved value, or start from a fresh order"
            )


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()

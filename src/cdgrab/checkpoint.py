"""What is saved, what is checked before a saved state is let in, and what is said when it does not fit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

VERSION = 2


def pack(payload: dict[str, Any]) -> bytes:
    """One piece of bytes, whatever the sizes of the tensors in it.

    `torch.distributed.checkpoint` loads into tensors of the right shape only, and those of a fresh ordering are empty.
    """
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def unpack(
    state: dict[str, Any], config: dict[str, Any], num_units: list[int], *, records: bool, sketched: bool
) -> dict[str, Any]:
    """Check `state` and return what it packs, on the CPU; raises `ValueError` if it does not fit.

    Args:
        state: What `Ordering.state_dict` returned.
        config: What must agree.
        num_units: Units of each local worker.
        records: Whether gradients come as records.
        sketched: Whether they are sketched.
    """
    missing = {"version", "config", "epoch", "payload"} - state.keys()
    if missing:
        raise ValueError(f"this is not the state of an ordering: {', '.join(sorted(missing))} missing")
    if state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this release of cdgrab reads version {VERSION}; "
            "load it with the release that saved it"
        )
    for field, expected in config.items():
        found = state["config"].get(field)
        if found != expected:
            raise ValueError(
                f"the state was saved with {field}={found!r}, this ordering has {field}={expected!r}; make the "
                "ordering with the saved value, or start from a fresh order"
            )
    try:
        payload: dict[str, Any] = torch.load(io.BytesIO(state["payload"]), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(f"the state is damaged and cannot be read: {error}") from error
    for order, expected in zip(payload["orders"], num_units, strict=True):
        if not np.array_equal(np.sort(order.numpy()), np.arange(expected)):
            raise ValueError(f"the saved order is not a permutation of {expected} units; the state is damaged")
    _check_source(payload, config["rule"], records=records, sketched=sketched)
    return payload


def _check_source(payload: dict[str, Any], rule: str, *, records: bool, sketched: bool) -> None:
    """Whether gradients come as they did when the state was taken."""
    # Between epochs nothing is left of either form, unless the rule remembers something.
    nothing_left = payload["progress"]["turns"] == 0 and rule == "greedy"
    if payload["records"] != records and not nothing_left:
        kinds = {True: "as records of layers (source='ghost')", False: "as rows"}
        raise ValueError(
            f"the state was taken within an epoch with gradients {kinds[payload['records']]}, and this ordering "
            f"has them {kinds[records]}; attach the model before loading, as it was, or load a state taken "
            "between epochs"
        )
    if (payload["sketch"] is not None) != sketched:
        kinds = {False: "without", True: "with a model attached by source='sketch'"}
        raise ValueError(
            f"the state was taken {kinds[payload['sketch'] is not None]}, and this ordering is "
            f"{kinds[sketched]}; attach the model before loading"
        )

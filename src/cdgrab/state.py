"""Packs a state for saving, and checks a saved one before it is loaded."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from cdgrab.lanes import Lanes

VERSION = 5


def pack(payload: dict[str, Any]) -> bytes:
    """Serialise a payload to bytes.

    `torch.distributed.checkpoint` loads only into tensors of the right shape, and those of a fresh ordering are empty.
    """
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def unpack(
    state: dict[str, Any],
    config: dict[str, Any],
    lanes: Lanes,
    *,
    form: str,
    remembers: str | None,
) -> dict[str, Any]:
    """Check `state` and return its payload, on the CPU; raises `ValueError` if it does not fit.

    Args:
        state: The dict that `Ordering.state_dict` returned.
        config: The values that must agree.
        lanes: The lanes of this process.
        form: The form in which gradients come, in words.
        remembers: The state besides the order that carries over between epochs, in words, or None.
    """
    if not isinstance(state, dict):
        raise ValueError(
            f"the state of an ordering is the dict that state_dict() returned; found a {type(state).__name__}"
        )
    missing = {"version", "config", "epoch", "payload"} - state.keys()
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(sorted(missing))}; pass the dict that Ordering.state_dict() returned"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this release of cdgrab reads version {VERSION}; load it with "
            "the release that saved it"
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
        raise ValueError(f"the state is damaged and cannot be read ({error}); load another checkpoint") from error
    order_N, planned_N = payload["order"].numpy(), np.arange(lanes.num_units)
    if not np.array_equal(np.sort(order_N), planned_N):
        raise ValueError(
            f"the state is damaged: its order is not a permutation of {lanes.num_units} units; load another checkpoint"
        )
    if not np.array_equal(lanes.lane_of(order_N), lanes.lane_of(planned_N)):
        raise ValueError("the state is damaged: its order moves units between lanes; load another checkpoint")
    _check_source(payload, form, remembers)
    return payload


def _check_source(payload: dict[str, Any], form: str, remembers: str | None) -> None:
    """Raise `ValueError` if gradients come in another form than the state needs to continue."""
    if payload["form"] != form:
        found = f"gradients as {payload['form']}, and this ordering has them as {form}"
        remedy = "make the ordering, and attach the model before loading, as it was then"
        if payload["progress"]["rows"]:
            raise ValueError(
                f"the state was taken within an epoch with {found}; {remedy}, or load a state taken between epochs"
            )
        if remembers is not None:
            raise ValueError(f"the state was taken with {found}, and {remembers} goes on from earlier epochs; {remedy}")

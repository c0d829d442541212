"""What is checked before a saved state is let in, and what is said when it does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np

VERSION = 1


def check(state: dict[str, Any], config: dict[str, Any], num_units: list[int]) -> None:
    """Raise `ValueError` if `state` was not saved by an ordering of this `config`.

    Args:
        state: What `Ordering.state_dict` returned.
        config: What must agree.
        num_units: Units of each local worker.
    """
    missing = {"version", "config", "epoch", "dim", "orders", "progress", "sorter"} - state.keys()
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
    for order, expected in zip(state["orders"], num_units, strict=True):
        if not np.array_equal(np.sort(order.numpy()), np.arange(expected)):
            raise ValueError(f"the saved order is not a permutation of {expected} units; the state is damaged")

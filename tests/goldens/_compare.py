"""Holds what a run has left against `goldens.json`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest


@functools.cache
def goldens() -> Any:
    return json.loads((Path(__file__).parent / "goldens.json").read_text())


def assert_golden(name: str, found: dict[str, Any]) -> None:
    _assert_same(found, goldens()[name], "")
    # What was sent before a run was saved is not counted again.
    _assert_same(found["resumed"], found, "of a run that was taken up in the middle, ", left_out=("bytes",))


def _assert_same(found: Any, expected: Any, where: str, left_out: tuple[str, ...] = ()) -> None:
    """But for rounding: a resumed DistributedDataParallel has buckets of its own, and averages in another way."""
    assert len(found["epochs"]) == len(expected["epochs"])
    for epoch, (one, other) in enumerate(zip(found["epochs"], expected["epochs"], strict=True)):
        assert one.keys() == other.keys()
        for key in other.keys() - left_out:
            same = pytest.approx(other[key], rel=1e-9) if isinstance(other[key], float) else other[key]
            assert one[key] == same, f"{where}{key} of epoch {epoch}"
    assert found["parameters"] == pytest.approx(expected["parameters"], rel=1e-9), where

"""What small runs on real ranks leave has not changed, and every rank leaves the same model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from distributed._ranks import run_ranks
from goldens._cases import ON_RANKS, run_all
from goldens._compare import assert_golden


@cache
def found(size: int) -> list[dict[str, Any]]:
    return run_ranks(size, run_all, ON_RANKS, size)


@pytest.mark.parametrize("name", ON_RANKS)
@pytest.mark.parametrize("size", [2, 4])
def test_golden(size: int, name: str) -> None:
    first, *others = (rank[name] for rank in found(size))
    assert_golden(f"{size} ranks: {name}", first)
    if ON_RANKS[name].source is not None:  # without one, ranks of these runs train alone
        assert all(rank["parameters"] == first["parameters"] for rank in others)

from __future__ import annotations

import pytest

from cdgrab import World


def test_detect_without_process_group_is_one_process() -> None:
    assert World.detect() == World(rank=0, size=1)


def test_simulated_workers_are_lanes_now() -> None:
    with pytest.raises(ValueError, match=r"World\.simulated\(3\) is gone.*pass lanes=3"):
        World.simulated(3)


def test_forgotten_initialisation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4 but torch\.distributed is not initialised; call"):
        World.detect()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "world size is 0; pass 1 or more"),
        ({"rank": 3, "size": 3}, "rank is 3; with 3 processes it must be 0 to 2"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        World(**arguments)

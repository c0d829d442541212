"""Damages states at length: `python -m tests.soak.damage`. Prints what was refused; exits with 1 if not all was."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from resume._damage import around, edited, flipped, loads, truncated
from resume.test_damaged_states import POSSIBLE, STATES, maker, saved

FLIPS, CUTS = 10_000, 1_000

# What a short test can do without.
MORE: dict[str, tuple[dict[str, Any], int, bool]] = {
    "at the start": ({}, 0, False),
    "between epochs": ({}, 4, False),
    "in the middle": ({}, 6, False),
    "all lanes": ({"lanes": 12}, 3, False),
    "an order without gradients": ({"order": "rr"}, 6, False),
}


def main() -> int:
    generator, states = random.Random(0), {**STATES, **MORE}
    total: Counter[str] = Counter()
    wrong: list[str] = []
    for name, (options, steps, named) in states.items():
        make = maker(**options)
        state = saved(make, steps, named=named)

        def bits(state: dict[str, Any] = state) -> Iterator[tuple[str, Any]]:
            yield from ((f"flip {n}", flipped(state, generator)) for n in range(-(-FLIPS // len(states))))
            yield from ((f"cut {n}", truncated(state, generator)) for n in range(-(-CUTS // len(states))))

        for kind, damage in (("bits", bits()), ("fields", edited(state)), ("around", around(state))):
            found, others = loads(make, damage)
            others = [text for text in others if not any(possible in text for possible in POSSIBLE)]
            found["silent"] = sum(text.startswith("silent") for text in others)
            print(f"{name}, {kind}: {dict(found)}", *others, sep="\n    ")
            total += found
            wrong += others
    print(f"all: {dict(total)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

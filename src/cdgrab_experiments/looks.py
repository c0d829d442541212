"""Colours, dashes and markers of contenders, the same in every figure and on the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How a contender is drawn: colours on white and on dark, dashes as in SVG (none for a plain line), a marker."""

    light: str
    dark: str
    dash: tuple[int, ...]
    marker: str


# Distinguishable with any colour vision (Okabe and Ito, lightened for dark pages); dashes and markers tell them apart
# where colours are not seen at all.
COLOURS = {
    "orange": ("#D55E00", "#FF8F45"),
    "blue": ("#0072B2", "#55AEF0"),
    "green": ("#009E73", "#35C79B"),
    "pink": ("#B8558C", "#E79CC6"),
    "amber": ("#C98A00", "#F2BC4B"),
    "sky": ("#3A9BD9", "#A5DBFA"),
    "grey": ("#666666", "#A8ACB3"),
}
KNOWN = {
    "cd-grab": Look(*COLOURS["orange"], (), "o"),
    "rr": Look(*COLOURS["blue"], (), "s"),
    "id-grab": Look(*COLOURS["pink"], (7, 3), "D"),
    "pair": Look(*COLOURS["green"], (2, 2), "^"),
    "cd-grab (halving)": Look(*COLOURS["amber"], (7, 3), "v"),
    "cd-grab (walk)": Look(*COLOURS["sky"], (2, 2), "P"),
    "grab": Look(*COLOURS["green"], (7, 3), "v"),
    "global-rr": Look(*COLOURS["sky"], (7, 3), "X"),
    "shuffle-once": Look(*COLOURS["grey"], (7, 3), "P"),
    "shared-rr": Look(*COLOURS["sky"], (7, 3, 2, 3), "<"),
    "all-plus": Look(*COLOURS["grey"], (2, 2), "X"),
    "flip-flop": Look(*COLOURS["amber"], (2, 2), "<"),
}
PATTERNS: list[tuple[int, ...]] = [(7, 3, 2, 3), (2, 2), (7, 3), (10, 4)]
MARKERS = "oDv^sPX<>*"


def looks(contenders: Iterable[str]) -> dict[str, Look]:
    """A look for every contender, different for the first twenty that `KNOWN` does not list."""
    taken = {(look.light, look.dash) for look in KNOWN.values()}
    spare = [
        Look(light, dark, pattern, MARKERS[i % len(MARKERS)])
        for pattern in PATTERNS
        for i, (light, dark) in enumerate(COLOURS.values())
        if (light, pattern) not in taken
    ]
    found: dict[str, Look] = {}
    strangers = 0
    for contender in dict.fromkeys(contenders):
        if contender in KNOWN:
            found[contender] = KNOWN[contender]
        else:
            found[contender] = spare[strangers % len(spare)]
            strangers += 1
    return found

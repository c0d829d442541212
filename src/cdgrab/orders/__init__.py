"""The orders by name. A new one is a function, or a composition of existing parts, and one line in `ORDERS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from cdgrab.orders.baselines import (
    Baseline,
    all_plus,
    block_reversal,
    fixed,
    flip_flop,
    reshuffled,
    reshuffled_together,
)


@dataclass(frozen=True)
class Free:
    """An order that needs no gradients.

    Attributes:
        baseline: Returns the order of an epoch.
        shuffle: Deal the examples from a seeded permutation; `False` deals them in the order of the dataset.
        redeal: Deal again in every epoch, so that examples move between lanes.
    """

    baseline: Baseline
    shuffle: bool = True
    redeal: bool = False
    needs_gradients: ClassVar[bool] = False
    centring: ClassVar[None] = None
    coordinated: ClassVar[bool] = False


@dataclass(frozen=True)
class Balanced:
    """An order found by balancing gradients.

    Attributes:
        centring: `"pair"` balances differences of neighbouring units (PairBalance), `"mean"` balances each unit's
            gradient minus the lane's mean of the epoch before (MeanBalance).
        coordinated: All lanes share one running sum; otherwise each has its own.
    """

    centring: Literal["pair", "mean"]
    coordinated: bool
    shuffle: ClassVar[bool] = True
    redeal: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = True


@dataclass(frozen=True)
class Herded:
    """Greedy herding on the stored gradients of a whole epoch: `O(units * dim)` memory, for small studies."""

    shuffle: ClassVar[bool] = True
    redeal: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = True
    centring: ClassVar[None] = None
    coordinated: ClassVar[bool] = True


OrderSpec = Free | Balanced | Herded

ORDERS: dict[str, OrderSpec] = {
    "rr": Free(reshuffled),
    "shared-rr": Free(reshuffled_together),
    "global-rr": Free(fixed, redeal=True),
    "shuffle-once": Free(fixed),
    "flip-flop": Free(flip_flop),
    "block-reversal": Free(block_reversal),
    "sequential": Free(fixed, shuffle=False),
    "all-plus": Free(all_plus),
    "cd-grab": Balanced("pair", coordinated=True),
    "pair": Balanced("pair", coordinated=False),
    "grab": Balanced("mean", coordinated=True),
    "id-grab": Balanced("mean", coordinated=False),
    "greedy-herding": Herded(),
}
"""The orders by name. `Free` ones need no gradients, `Balanced` and `Herded` ones do."""


def find_order(name: str) -> OrderSpec:
    """The order with this name."""
    if name not in ORDERS:
        raise ValueError(f"unknown order {name!r}; choose one of {', '.join(ORDERS)}")
    return ORDERS[name]

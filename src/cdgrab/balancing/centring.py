"""What gets balanced: differences of pairs, or gradients minus last epoch's mean.

A centring takes the rows of all lanes visit by visit and yields *balancing rows* in balancing order: visit by visit,
within a visit lane by lane. They come as two tensors, to be subtracted by whoever uses them, so that long rows need not
be copied. What is yielded is to be used before the next is asked for. Whatever a centring keeps, it copies.

Shapes: `m` visits, `p` balancing rows of each lane, `L` lanes, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cdgrab.lanes import BoolArray


class Centred(NamedTuple):
    """Balancing rows `rows - minus`; `lanes_pL` says which of them there are, None: all."""

    rows_pLD: Tensor
    minus_pLD: Tensor
    lanes_pL: BoolArray | None


class Centring(Protocol):
    """One way of making balancing rows out of gradients."""

    units_per_row: int

    def start_epoch(self) -> None: ...

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> Iterator[Centred]:
        """Take the rows of the next visits; `counts_mL` says which of them are units, None: all."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PairDifferences:
    """PairBalance: first of a pair minus second. Whatever the rows have in common cancels; no mean is needed.

    A pair is two consecutive visits of a lane. If the lane has no unit in one of them, the other stays alone.
    """

    units_per_row = 2

    def __init__(self, num_lanes: int) -> None:
        self._held_LD = torch.zeros(num_lanes, 0)
        self._held_counts_L = np.ones(num_lanes, dtype=bool)
        self._holding = False

    def start_epoch(self) -> None:
        self._holding = False

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> Iterator[Centred]:
        start, visits = int(self._holding), len(rows_mLD)
        if self._holding:
            counts_L = True if counts_mL is None else counts_mL[0]
            yield Centred(self._held_LD[None], rows_mLD[:1], _or_none(self._held_counts_L[None] & counts_L))
        paired = start + (visits - start) // 2 * 2
        if paired > start:
            both = None if counts_mL is None else counts_mL[start:paired:2] & counts_mL[start + 1 : paired : 2]
            yield Centred(rows_mLD[start:paired:2], rows_mLD[start + 1 : paired : 2], _or_none(both))
        self._holding = paired < visits
        if self._holding:
            if self._held_LD.shape[1] != rows_mLD.shape[2]:
                self._held_LD = torch.empty_like(rows_mLD[0], memory_format=torch.contiguous_format)
            self._held_LD.copy_(rows_mLD[paired])
            self._held_counts_L[:] = True if counts_mL is None else counts_mL[paired]

    def state_dict(self) -> dict[str, Any]:
        # Only rows that wait for a partner are state; the others are left over from earlier pairs.
        held = self._held_LD if self._holding else self._held_LD[:0]
        return {"held": held.clone(), "counts": torch.from_numpy(self._held_counts_L.copy()), "holding": self._holding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        held_LD, self._holding = state["held"], state["holding"]
        self._held_counts_L = state["counts"].cpu().numpy().copy()
        num_lanes = len(self._held_counts_L)
        self._held_LD = held_LD.clone() if self._holding else held_LD.new_zeros(num_lanes, held_LD.shape[1])


class MeanCentred:
    """MeanBalance: each row minus its lane's mean row of the epoch before (zero in the first epoch).

    The mean is per lane: a unit only ever changes places with units of its own lane, so what all of them have in common
    is the lane's mean, not everybody's.
    """

    units_per_row = 1

    def __init__(self, num_lanes: int) -> None:
        self._mean_LD = torch.zeros(num_lanes, 0)
        self._total_LD = torch.zeros(num_lanes, 0)
        self._count_L = torch.zeros(num_lanes)

    def start_epoch(self) -> None:
        seen_L = self._count_L > 0
        mean_LD = self._total_LD / self._count_L.clamp(min=1)[:, None]
        self._mean_LD = torch.where(seen_L[:, None], mean_LD, self._mean_LD)
        self._total_LD = torch.zeros_like(self._total_LD)
        self._count_L = torch.zeros_like(self._count_L)

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> Iterator[Centred]:
        if self._mean_LD.shape[1] != rows_mLD.shape[2]:
            self._mean_LD = rows_mLD.new_zeros(len(self._count_L), rows_mLD.shape[2])
            self._total_LD = torch.zeros_like(self._mean_LD)
            self._count_L = rows_mLD.new_zeros(len(self._count_L))
        yield Centred(rows_mLD, self._mean_LD.expand_as(rows_mLD), _or_none(counts_mL))
        # The total is taken of the rows as they came, not of the centred ones. A row counts if its squared length is
        # finite, as in the balancer; nothing here waits for a device.
        counts = torch.isfinite(rows_mLD.square().sum(-1))
        if counts_mL is not None:
            counts &= torch.from_numpy(counts_mL).to(counts.device)
        self._total_LD += torch.where(counts[..., None], rows_mLD, 0.0).sum(0)
        self._count_L += counts.sum(0)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean_LD.clone(), "total": self._total_LD.clone(), "count": self._count_L.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean_LD, self._total_LD, self._count_L = (state[key].clone() for key in ("mean", "total", "count"))


def _or_none(lanes_pL: BoolArray | None) -> BoolArray | None:
    return None if lanes_pL is None or lanes_pL.all() else lanes_pL


CENTRINGS: dict[str, Callable[[int], Centring]] = {"pair": PairDifferences, "mean": MeanCentred}

"""Makes balancing rows: differences of pairs, or gradients minus last epoch's mean.

A centring takes the rows of all lanes visit by visit. It yields *balancing rows* in balancing order: visit by visit,
within a visit lane by lane. Each item is two tensors that the caller subtracts, so that long rows need not be copied.
Use an item before asking for the next one. A centring copies whatever it keeps.

Shapes: `m` visits, `p` balancing rows of each lane, `L` lanes, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cdgrab.fields import Fields
from cdgrab.lanes import BoolArray


class Centred(NamedTuple):
    """Balancing rows `rows - minus`; `lanes_pL` says which of them exist, None: all."""

    rows_pLD: Tensor
    minus_pLD: Tensor
    lanes_pL: BoolArray | None


class Centring(Protocol):
    """Makes balancing rows out of gradients."""

    units_per_row: int

    @property
    def holds(self) -> int:
        """The number of visits whose rows wait for others."""

    def start_epoch(self) -> None: ...

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> Iterator[Centred]:
        """Take the rows of the next visits; `counts_mL` says which of them are units, None: all."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        """Load the state of rows of `dim` numbers; 0 if there has been none."""


class PairDifferences:
    """PairBalance: first of a pair minus second. What the rows have in common cancels; no mean is needed.

    A pair is two consecutive visits of a lane. If the lane has no unit in one of them, the other has no partner.
    """

    units_per_row = 2

    def __init__(self, num_lanes: int) -> None:
        self._buffer_LD = torch.zeros(num_lanes, 0)
        self._buffer_counts_L = np.ones(num_lanes, dtype=bool)
        self._is_waiting = False

    @property
    def holds(self) -> int:
        return int(self._is_waiting)

    def start_epoch(self) -> None:
        self._is_waiting = False

    def add(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> Iterator[Centred]:
        start, visits = int(self._is_waiting), len(rows_mLD)
        if self._is_waiting:
            counts_L = True if counts_mL is None else counts_mL[0]
            yield Centred(self._buffer_LD[None], rows_mLD[:1], _or_none(self._buffer_counts_L[None] & counts_L))
        paired = start + (visits - start) // 2 * 2
        if paired > start:
            both = None if counts_mL is None else counts_mL[start:paired:2] & counts_mL[start + 1 : paired : 2]
            yield Centred(rows_mLD[start:paired:2], rows_mLD[start + 1 : paired : 2], _or_none(both))
        self._is_waiting = paired < visits
        if self._is_waiting:
            if self._buffer_LD.shape[1] != rows_mLD.shape[2]:
                self._buffer_LD = torch.empty_like(rows_mLD[0], memory_format=torch.contiguous_format)
            self._buffer_LD.copy_(rows_mLD[paired])
            self._buffer_counts_L[:] = True if counts_mL is None else counts_mL[paired]

    def state_dict(self) -> dict[str, Any]:
        # Rows that wait for a partner are state. Otherwise the buffer holds rows of an earlier pair.
        buffer = self._buffer_LD if self._is_waiting else self._buffer_LD[:0, :0]
        counts = torch.from_numpy(self._buffer_counts_L.copy())
        return {"held": buffer.clone(), "counts": counts, "holding": self._is_waiting}

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        num_lanes = len(self._buffer_counts_L)
        self._is_waiting = state.flag("holding")
        self._buffer_counts_L = state.tensor("counts", num_lanes, dtype=torch.bool).cpu().numpy()
        held_LD = state.tensor("held", num_lanes * self._is_waiting, dim * self._is_waiting, dtype=dtype)
        self._buffer_LD = held_LD if self._is_waiting else self._buffer_LD


class MeanCentred:
    """MeanBalance: each row minus its lane's mean row of the epoch before (zero in the first epoch).

    The mean is per lane: a unit changes places only with units of its own lane, so they have the lane's mean in common,
    not that of all lanes.
    """

    units_per_row = 1
    holds = 0

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
        # The total sums the rows as they came, not the centred ones. A row counts if its squared length is finite, as
        # in the balancer. Nothing here waits for a device.
        counts = torch.isfinite(rows_mLD.square().sum(-1))
        if counts_mL is not None:
            counts &= torch.from_numpy(counts_mL).to(counts.device)
        self._total_LD += torch.where(counts[..., None], rows_mLD, 0.0).sum(0)
        self._count_L += counts.sum(0)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean_LD.clone(), "total": self._total_LD.clone(), "count": self._count_L.clone()}

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        num_lanes = len(self._count_L)
        mean_LD = state.tensor("mean", num_lanes, (0, dim), dtype=dtype)
        self._mean_LD, self._total_LD = mean_LD, state.tensor("total", *mean_LD.shape, dtype=dtype)
        self._count_L = state.tensor("count", num_lanes, dtype=dtype if mean_LD.shape[1] else torch.float32)


def _or_none(lanes_pL: BoolArray | None) -> BoolArray | None:
    return None if lanes_pL is None or lanes_pL.all() else lanes_pL


CENTRINGS: dict[str, Callable[[int], Centring]] = {"pair": PairDifferences, "mean": MeanCentred}

"""Rank 0 is the order server: the others send it their rows, and receive signs when the epoch ends.

The paper's architecture as drawn. All traffic ends at one rank, but the others need no memory for ordering.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.exchange.base import BoolArray
from cdgrab.exchange.gather import Gather
from cdgrab.orders.decisions import Decided


class Server:
    """Gathers rows on the group's first rank and broadcasts what it decided."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._counts = Gather(group)
        self.bytes_sent = 0

    def collect(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> tuple[Tensor | None, BoolArray | None]:
        counts_mW = self._counts.gather_counts(rows_mLD, counts_mL)
        rows_mLD = rows_mLD.contiguous()
        serving = dist.get_rank(self._group) == 0
        parts = [torch.empty_like(rows_mLD) for _ in range(dist.get_world_size(self._group))] if serving else None
        dist.gather(rows_mLD, parts, group=self._group, group_dst=0)
        if parts is None:
            self.bytes_sent += rows_mLD.numel() * rows_mLD.element_size()
            return None, counts_mW
        return torch.cat(parts, dim=1), counts_mW

    def share(self, decided: Decided) -> Decided:
        serving = dist.get_rank(self._group) == 0
        length = torch.tensor([len(decided[0])])
        dist.broadcast(length, group=self._group, group_src=0)
        packed = torch.zeros(2, int(length), dtype=torch.int64)
        if serving:
            packed = torch.from_numpy(np.stack([decided[0], decided[1].astype(np.int64)]))
            self.bytes_sent += (dist.get_world_size(self._group) - 1) * packed.numel() * 8
        dist.broadcast(packed, group=self._group, group_src=0)
        workers, signs = packed.numpy()
        return workers, signs.astype(np.int8)

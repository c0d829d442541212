"""Every rank receives every row: the replicated order server of the paper's code.

Simple and exact, and the yardstick for cheaper exchanges; its traffic is `W / 2` times that of an all-reduce.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.exchange.base import BoolArray
from cdgrab.orders.decisions import Decided


class Gather:
    """All-gathers the rows of each step over a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.bytes_sent = 0

    def collect(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> tuple[Tensor, BoolArray | None]:
        return self._all_gather(rows_mLD), self.gather_counts(rows_mLD, counts_mL)

    def gather_counts(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> BoolArray:
        """Which rows of all workers are units; ranks may differ in it at the end of an epoch."""
        everything = np.ones(rows_mLD.shape[:2], dtype=np.uint8)
        mine = torch.tensor(everything if counts_mL is None else counts_mL.astype(np.uint8), device=rows_mLD.device)
        return self._all_gather(mine).cpu().numpy().astype(bool)

    def share(self, decided: Decided) -> Decided:
        return decided

    def _all_gather(self, local_mL: Tensor) -> Tensor:
        size = dist.get_world_size(self._group)
        parts = [torch.empty_like(local_mL, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, local_mL.contiguous(), group=self._group)
        self.bytes_sent += (size - 1) * local_mL.numel() * local_mL.element_size()
        return torch.cat(parts, dim=1)

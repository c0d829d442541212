"""Every rank receives every row: the replicated order server of the paper's code.

Simple and exact, and the yardstick for cheaper exchanges; its traffic is `W / 2` times that of an all-reduce.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.exchange.base import BoolArray


class Gather:
    """All-gathers the rows of each step over a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def collect(self, rows_mLD: Tensor, counts_mL: BoolArray | None) -> tuple[Tensor, BoolArray | None]:
        everything = np.ones(rows_mLD.shape[:2], dtype=bool)
        counts = torch.tensor(everything if counts_mL is None else counts_mL, device=rows_mLD.device)
        return self._all_gather(rows_mLD), self._all_gather(counts).cpu().numpy()

    def _all_gather(self, local_mL: Tensor) -> Tensor:
        parts = [torch.empty_like(local_mL) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, local_mL.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)

"""Rank 0 is the order server: the others send it their rows, and receive signs when the epoch ends.

The paper draws this architecture. All traffic ends at one rank, but the others need no memory for ordering.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.exchange.base import Exchange
from cdgrab.exchange.collectives import waiting_for
from cdgrab.exchange.gather import Gather, by_lane
from cdgrab.orders.fill import SignArray


class Server(Gather):
    """Gathers rows on the group's first rank, which broadcasts the signs."""

    name = "server"
    shares_signs = True
    replicates = False
    start = Exchange.start

    def collect(self, rows_mJD: Tensor) -> Tensor | None:  # type: ignore[override]
        rows_mJD = rows_mJD.contiguous()
        serving = dist.get_rank(self.group) == 0
        parts = [torch.empty_like(rows_mJD) for _ in range(dist.get_world_size(self.group))] if serving else None
        with waiting_for("rows", self.group):
            dist.gather(rows_mJD, parts, group=self.group, group_dst=0)
        if parts is None:
            self.bytes_sent += rows_mJD.numel() * rows_mJD.element_size()
            return None
        return by_lane(parts)

    def share(self, signs_PL: SignArray) -> SignArray:
        serving, num_lanes = dist.get_rank(self.group) == 0, signs_PL.shape[1]
        length = torch.tensor([len(signs_PL)])
        dist.broadcast(length, group=self.group, group_src=0)
        shared = torch.zeros(int(length), num_lanes, dtype=torch.int8)
        if serving:
            shared = torch.from_numpy(signs_PL)
            self.bytes_sent += (dist.get_world_size(self.group) - 1) * shared.numel()
        dist.broadcast(shared, group=self.group, group_src=0)
        return shared.numpy()

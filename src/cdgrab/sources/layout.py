"""The coordinates of a model that each rank holds, and their move when buckets are rebuilt.

`DistributedDataParallel` rebuilds its buckets after the first step. A bucket is cut into one slice per rank. With other
buckets a rank holds other coordinates, so stored columns must move to the ranks that hold them now. Coordinates are
those of all trainable parameters laid end to end.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cdgrab.exchange.collectives import slice_widths

Bucket = tuple[int, ...]  # numbers of the parameters in it, in order


class Layout:
    """Buckets of parameters, each cut into slices as `slice_widths` says."""

    def __init__(self, numels: list[int], buckets: list[Bucket], num_ranks: int) -> None:
        self.buckets = buckets
        self._num_ranks = num_ranks
        self._dim = sum(numels)
        starts = [0]
        for numel in numels:
            starts.append(starts[-1] + numel)
        self._coordinates = [
            torch.cat([torch.arange(starts[number], starts[number + 1]) for number in bucket]) for bucket in buckets
        ]

    def coordinates(self, rank: int) -> Tensor:
        """The coordinates that `rank` holds: its slice of every bucket."""
        return torch.cat(
            [
                coordinates.split(slice_widths(len(coordinates), self._num_ranks))[rank]
                for coordinates in self._coordinates
            ]
        )

    def owners(self) -> Tensor:
        """The rank that holds each coordinate."""
        owners = torch.empty(self._dim, dtype=torch.int32)
        for rank in range(self._num_ranks):
            owners[self.coordinates(rank)] = rank
        return owners


def redistribute(values_Rn: Tensor, old: Layout, new: Layout, group: dist.ProcessGroup | None) -> Tensor:
    """Move columns from the ranks that hold them in `old` to those that hold them in `new`, with one all-to-all.

    Args:
        values_Rn: `R` numbers for each of the `n` coordinates this rank holds in `old`, on any device.
        old: The layout before.
        new: The layout after.
        group: The ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    owners = new.owners()
    mine = old.coordinates(rank)
    send_order = torch.argsort(owners[mine], stable=True)
    sent_to = torch.bincount(owners[mine], minlength=size).tolist()
    theirs = [old.coordinates(other) for other in range(size)]
    arriving = [coordinates[owners[coordinates] == rank] for coordinates in theirs]

    sent = values_Rn.T[send_order.to(values_Rn.device)].contiguous()  # (n, R), grouped by receiver
    received = values_Rn.new_empty(sum(map(len, arriving)), values_Rn.shape[0])
    dist.all_to_all_single(received, sent, [len(a) for a in arriving], sent_to, group=group)

    place = torch.empty(len(owners), dtype=torch.int64)
    place[new.coordinates(rank)] = torch.arange(len(received))
    moved = torch.empty_like(received)
    moved[place[torch.cat(arriving)].to(moved.device)] = received
    return moved.T.contiguous()

"""Rank and size of a process, as plain data.

Code that decides an order gets a `World` and never asks `torch.distributed`, so tests can simulate hundreds of ranks in
one process. Only code that communicates asks its process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


def process_group(group: Group) -> dist.ProcessGroup | None:
    """The process group of a one-dimensional device mesh; a process group is passed through."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the device mesh has {group.ndim} dimensions {group.mesh_dim_names or ''}; pass the one along "
                "which data differ, as in mesh['dp']"
            )
        return group.get_group()
    return group


@dataclass(frozen=True)
class World:
    """The processes that share the lanes.

    Args:
        rank: The number of this process, `0 <= rank < size`.
        size: The number of processes.

    Example:
        >>> World(rank=1, size=4)
        World(rank=1, size=4)
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"world size is {self.size}; pass 1 or more")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; with {self.size} processes it must be 0 to {self.size - 1}")

    @classmethod
    def simulated(cls, size: int) -> NoReturn:
        """Raise `ValueError` with the remedy: simulated workers are lanes now."""
        raise ValueError(
            f"World.simulated({size}) is gone, since workers are lanes now; leave world= out and pass lanes={size}"
        )

    @classmethod
    def detect(cls, group: Group = None) -> World:
        """The world that `torch.distributed` knows; a single process if it was not launched with several.

        Args:
            group: The ranks that hold different data: a process group, or one dimension of a `DeviceMesh` (its peers
                along other dimensions, tensor-parallel ones for instance, then have the same rank). By default all.
        """
        group = process_group(group)
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(group), size=dist.get_world_size(group))
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1:
            # Otherwise every rank would train on all the data, in the same order, in silence.
            raise ValueError(
                f"WORLD_SIZE is {launched} but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() before making the ordering, or pass world="
            )
        return cls()

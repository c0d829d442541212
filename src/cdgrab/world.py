"""Who takes part in training: rank and size as plain data.

Whatever decides an order is handed a `World` and never asks `torch.distributed` itself, so hundreds of ranks are
tested without starting one process. Only what talks to other ranks asks its process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

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
    """The workers among which the examples are dealt.

    Args:
        rank: This process's worker, `0 <= rank < size`.
        size: Number of workers.
        one_process: All `size` workers live in this one process. A loader then delivers, for every step, the
            examples of worker 0, then those of worker 1, and so on.

    Example:
        >>> World.simulated(4).local_workers
        range(0, 4)
    """

    rank: int = 0
    size: int = 1
    one_process: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"world size is {self.size}; it must be at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; with {self.size} workers it must be 0 to {self.size - 1}")
        if self.one_process and self.rank != 0:
            raise ValueError(f"rank is {self.rank}; a simulated world has one process, rank 0")

    @property
    def local_workers(self) -> range:
        """The workers whose examples this process visits."""
        return range(self.size) if self.one_process else range(self.rank, self.rank + 1)

    @classmethod
    def simulated(cls, size: int) -> World:
        """`size` workers in this one process: the results of `size` ranks without starting them."""
        return cls(size=size, one_process=True)

    @classmethod
    def detect(cls, group: Group = None) -> World:
        """Read rank and size from `torch.distributed`.

        Args:
            group: The ranks that hold different data: a process group, or one dimension of a `DeviceMesh` (its peers
                along other dimensions, tensor-parallel ones for instance, then share a worker). By default all ranks.
        """
        group = process_group(group)
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(group), size=dist.get_world_size(group))
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1:
            # Falling back to one worker would train every rank on all the data, in the same order, in silence.
            raise ValueError(
                f"WORLD_SIZE is {launched} but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() before making the ordering, or pass world="
            )
        return cls()

"""Two things about process groups that PyTorch leaves to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same ranks, with the same time-out, for ordering alone.

    All ranks must start the collectives of a group in the same order. Ordering starts its own beside training, so they
    must not share a group with whatever the training loop starts. All ranks of `group` must call this.
    """
    parent: Any = group or dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(parent) == "nccl" else "cpu")
    timeout = parent._get_backend(device).options._timeout
    made: Any = dist.new_group(dist.get_process_group_ranks(parent), timeout=timeout, use_local_synchronization=True)
    return made  # type: ignore[no-any-return]


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
    """All ranks' inputs one after the other, in one tensor."""
    start_all_gather(output, input, group)()


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """As `all_gather`, but only started: what is returned is to be called before `output` is used."""
    if dist.get_backend(group) != "gloo":
        # The function of that kind has changed its name.
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = function(output, input, group=group, async_op=True)
        return lambda: _wait([work])
    # Gloo's own passes everything on from neighbour to neighbour; sending it straight there is a third faster.
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    parts = output.view(len(ranks), -1)
    transfers = []
    for other in range(1, len(ranks)):
        to, source = (rank + other) % len(ranks), (rank - other) % len(ranks)
        transfers.append(dist.P2POp(dist.isend, input, ranks[to], group=group))
        transfers.append(dist.P2POp(dist.irecv, parts[source], ranks[source], group=group))
    pending = dist.batch_isend_irecv(transfers) if transfers else []
    parts[rank].copy_(input)
    return lambda: _wait(pending)


def _wait(pending: list[Any]) -> None:
    for work in pending:
        work.wait()

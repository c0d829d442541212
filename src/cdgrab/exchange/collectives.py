"""Three things about process groups that PyTorch leaves to the caller."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import cache
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
    if dist.get_backend(made) == "gloo":
        end_threads_before_python()
    return made  # type: ignore[no-any-return]


@cache
def end_threads_before_python() -> None:
    """Have Python wait a moment before it closes, so that gloo's threads can finish their last collective.

    A thread of gloo lets go of a tensor only after the loop has it, and needs Python for that. Python before 3.14 ends
    a thread that asks for it while closing, and C++ answers with "terminate called without an active exception": a
    run that went well ends with exit code -6. `destroy_process_group` joins the threads only if nothing holds the
    group, and FSDP holds it, with or without cdgrab: https://github.com/pytorch/pytorch/issues/190489.
    """
    atexit.register(time.sleep, 0.1)


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Start to put all ranks' inputs one after the other into `output`; call what is returned before using it.

    Inputs are as `slice_widths` cuts `output`: of one length, but for rank 0, whose may be longer.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    widths = slice_widths(output.numel(), len(ranks))
    if dist.get_backend(group) != "gloo":
        # The function of that kind has changed its name.
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        left_over = widths[0] - widths[-1]
        pending = [function(output[left_over:], input[input.numel() - widths[-1] :], group=group, async_op=True)]
        if left_over:
            if rank == 0:
                output[:left_over] = input[:left_over]
            pending.append(dist.broadcast(output[:left_over], ranks[0], group=group, async_op=True))
        return lambda: _wait(pending)
    # Gloo's own passes everything on from neighbour to neighbour; sending it straight there is a third faster.
    parts = output.split(widths)
    transfers = []
    for other in range(1, len(ranks)):
        to, source = (rank + other) % len(ranks), (rank - other) % len(ranks)
        if widths[rank]:
            transfers.append(dist.P2POp(dist.isend, input, ranks[to], group=group))
        if widths[source]:
            transfers.append(dist.P2POp(dist.irecv, parts[source], ranks[source], group=group))
    pending = dist.batch_isend_irecv(transfers) if transfers else []
    parts[rank].copy_(input)
    return lambda: _wait(pending)


def slice_widths(numel: int, size: int) -> list[int]:
    """How many numbers of a bucket each rank takes: all the same, and rank 0 what is left over, too.

    Example:
        >>> slice_widths(11, 4)
        [5, 2, 2, 2]
    """
    return [numel // size + numel % size] + [numel // size] * (size - 1)


def _wait(pending: list[Any]) -> None:
    for work in pending:
        work.wait()

"""Helpers around collectives: a group for ordering alone, an all-gather of uneven slices, gloo's threads at exit."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LostPeer(RuntimeError):
    """A collective failed, because another rank has stopped or is elsewhere."""


@contextmanager
def waiting_for(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn the error of a collective into one that names the rank and what it waited for."""
    try:
        yield
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        reason = str(error).partition("\n")[0]
        raise LostPeer(
            f"rank {rank} of {size} waited for {what} of other ranks, which did not come ({reason}). One of them has "
            "stopped, or is at another step: its own error says why"
        ) from error


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Create a group of the same ranks, with the same time-out, for ordering alone. All ranks of `group` must call it.

    All ranks must start the collectives of a group in the same order. Ordering starts its own beside training, so they
    must not share a group with those of the training loop.
    """
    parent: Any = group or dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(parent) == "nccl" else "cpu")
    timeout = parent._get_backend(device).options._timeout
    ranks = dist.get_process_group_ranks(parent)
    # A group that is made by some ranks alone is named after its ranks and the number of groups there are. Once one is
    # destroyed the next gets its name, and finds its old addresses in the store. Groups of all ranks are counted.
    some = len(ranks) < dist.get_world_size()
    made: Any = dist.new_group(ranks, timeout=timeout, use_local_synchronization=some)
    if dist.get_backend(made) == "gloo":
        end_threads_before_python()
    return made  # type: ignore[no-any-return]


@cache
def end_threads_before_python() -> None:
    """Make Python wait a moment before it exits, so that gloo's threads can finish their last collective.

    A gloo thread releases its tensor after the collective returns, and needs the interpreter for that. Python before
    3.14 ends a thread that asks for it during exit. C++ then aborts: "terminate called without an active exception".
    A successful run ends with exit code -6. `destroy_process_group` joins the threads only if nothing references
    the group, but FSDP does, with or without cdgrab: https://github.com/pytorch/pytorch/issues/190489.
    """
    atexit.register(time.sleep, 0.1)


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Start an all-gather of all ranks' inputs into `output`. Call the returned function before using `output`.

    Inputs have the lengths of `slice_widths`: rank 0's may be longer than the others.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    widths = slice_widths(output.numel(), len(ranks))
    if dist.get_backend(group) != "gloo":
        # Newer releases of PyTorch have another name for it.
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        left_over = widths[0] - widths[-1]
        pending = [function(output[left_over:], input[input.numel() - widths[-1] :], group=group, async_op=True)]
        if left_over:
            if rank == 0:
                output[:left_over] = input[:left_over]
            pending.append(dist.broadcast(output[:left_over], ranks[0], group=group, async_op=True))
        return lambda: _wait(pending)
    # Gloo's all-gather is a ring; sending to every rank directly is a third faster.
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
    """The widths of the slices of a bucket, by rank: all the same, but rank 0 takes the remainder, too.

    Example:
        >>> slice_widths(11, 4)
        [5, 2, 2, 2]
    """
    return [numel // size + numel % size] + [numel // size] * (size - 1)


def _wait(pending: list[Any]) -> None:
    for work in pending:
        work.wait()

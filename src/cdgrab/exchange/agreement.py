"""Checks that ranks agree: on what they train before the first step, and on every sign after each epoch.

Without the check, disagreement would train on wrong orders in silence, or hang in a collective. Ranks compare where all
of them communicate anyway. A difference is an error on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cdgrab.exchange.collectives import waiting_for


def check_same(what: str, mine: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise `ValueError` on every rank if the ranks' values differ; the message names ranks and values."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with waiting_for(what, group):
        dist.all_gather_object(everyone, mine, group=group)
    for field in mine:
        values = [theirs.get(field) for theirs in everyone]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"ranks disagree on {field} of {what} ({listed}); it must be the same on all ranks")


def check_digest(epoch: int, digest: int, group: dist.ProcessGroup | None) -> None:
    """Raise `RuntimeError` on every rank if ranks have decided different signs or are in different epochs."""
    mine = torch.tensor([epoch, digest])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
        mine, everyone = mine.to(device), [theirs.to(device) for theirs in everyone]
    with waiting_for("the digest of signs", group):
        dist.all_gather(everyone, mine, group=group)
    values = torch.stack(everyone).tolist()
    if any(value != values[0] for value in values):
        listed = ", ".join(f"rank {rank}: epoch {value[0]}, digest {value[1]:08x}" for rank, value in enumerate(values))
        raise RuntimeError(
            f"ranks disagree on the signs of an epoch ({listed}), so their orders would no longer fit together; resume "
            "all ranks from the same checkpoint"
        )

"""Short rows of a training loop, as an ordering gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _models import build
from cdgrab import Ordering, World
from cdgrab.ghost.passes import Pass


def listen(ordering: Ordering, model: nn.Module, *, replays: bool, **how: Any) -> list[Tensor]:
    """Attach `ordering` to `model`; what it observes will be in the list."""
    ordering.attach(model, source="sketch", **how)
    attachment: Any = ordering._attachment
    attachment.replays.possible = replays
    found: list[Tensor] = []

    def consume(turn: Pass, shapes: dict[str, torch.Size]) -> None:  # noqa: ARG001
        rows = attachment.sketcher(turn.records(), ordering.epoch)
        found.append(rows.clone())
        ordering._observe(rows)

    attachment.consume = consume
    return found


def sketches(
    name: str,
    *,
    replays: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    epochs: int = 8,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> tuple[list[Tensor], int]:
    """Rows of all batches, a short one in each epoch, with new projections after the sixth; and how many recordings
    there are at the end."""
    model, x, y = build(name, 26, dtype)
    model, x, y = model.to(device), x.to(device), y.to(device)
    ordering = Ordering(len(x), batch_size=6, unit_size=1, world=World.simulated(3), seed=1)
    found = listen(ordering, model, replays=replays, length=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        ordering.sampler.set_epoch(epoch)
        for batch in torch.tensor(list(ordering.sampler)).split(6):
            before(model, len(found))
            here = batch.to(device)
            cross_entropy(model(x[here]), y[here]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(found) == 5 * epochs
    attachment: Any = ordering._attachment
    return found, len(attachment.replays._recorded)

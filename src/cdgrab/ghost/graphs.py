"""CUDA graphs: work that is the same every time, recorded once and replayed on copies of what it works on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def recording(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any | None = None
) -> AbstractContextManager[None]:
    """Record what is done in here. Other threads, such as a loader's, may do what they like meanwhile."""
    found: AbstractContextManager[None] = torch.cuda.graph(
        graph, pool=pool, stream=stream, capture_error_mode="thread_local"
    )
    return found


def at_home(tensor: Tensor) -> Tensor:
    """A copy that stays where it is, for recordings to read."""
    return tensor.clone(memory_format=torch.contiguous_format)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each to the first, those of one type in one launch."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for there, here in pairs:
        theres, heres = by_type.setdefault(there.dtype, ([], []))
        theres.append(there)
        heres.append(here)
    for theres, heres in by_type.values():
        torch._foreach_copy_(theres, heres)

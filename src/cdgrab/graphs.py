"""CUDA graphs: work that is the same every time, recorded once and replayed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LITTLE_LEFT = 1 << 28  # bytes


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any | None = None) -> Iterator[None]:
    """Record what is done in here. Other threads, such as a loader's, may do what they like meanwhile.

    Unlike `torch.cuda.graph` it does not give cached memory back first, unless there is little left: tensors of the
    next step are to be where those of this one are.
    """
    collecting = gc.isenabled()
    # Whatever happens while recording, the stream that was current is current again afterwards.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        torch.cuda.synchronize()
        if torch.cuda.mem_get_info(device)[0] < _LITTLE_LEFT:
            torch.cuda.empty_cache()  # which cannot be done while recording
        gc.disable()  # what is collected meanwhile might have to wait for the device
        try:
            with torch.cuda.stream(_apart(device)):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()


@functools.cache
def _apart(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries take memory for every stream they see."""
    return torch.cuda.Stream(device)

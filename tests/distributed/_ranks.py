"""Starts real gloo ranks for a test and brings their answers back."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


def _rank_main(
    rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...], answers: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
        answers.put((rank, function(*arguments), None))
        dist.destroy_process_group()
    except Exception:
        answers.put((rank, None, traceback.format_exc()))


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on `size` ranks; the answers come back in the order of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank_main, args=(r, size, port, function, arguments, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    answers: list[Any] = [None] * size
    try:
        for _ in range(size):
            rank, answer, error = queue.get(timeout=TIMEOUT.seconds * 2)
            assert error is None, f"rank {rank}: {error}"
            answers[rank] = answer
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()
    return answers

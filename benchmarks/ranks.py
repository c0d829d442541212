"""Starts the ranks of a benchmark: processes on this machine that talk over gloo, one thread each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def launch(function: Callable[..., Iterator[Any]], size: int, *args: Any) -> Iterator[Any]:
    """Run `function(*args)` on `size` ranks; what it yields on rank 0 comes back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_on_a_rank, args=(rank, size, port, function, args, answers), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    while (answer := answers.get())[0] == "answer":
        yield answer[1]
    for process in ranks:
        process.join()
    if answer[0] == "error":
        raise RuntimeError(f"a rank failed: {answer[1]}")


def _on_a_rank(
    rank: int, size: int, port: int, function: Callable[..., Iterator[Any]], args: Any, answers: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        for answer in function(*args):
            if rank == 0:
                answers.put(("answer", answer))
    except BaseException as error:
        answers.put(("error", f"rank {rank}: {type(error).__name__}: {error}"))
        raise
    dist.barrier()
    if rank == 0:
        answers.put(("end", None))
    dist.destroy_process_group()

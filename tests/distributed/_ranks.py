"""Starts real gloo ranks for a test and brings their answers back."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A server process that has imported everything once and forks ranks from there: starting eight of them takes a second.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "cdgrab", "_inputs", "distributed._ranks"])


def _rank_main(
    rank: int, size: int, port: int, timeout: float, function: Callable[..., Any], arguments: Any, answers: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        # Pickled here, since tensors in a queue live in memory of the process that put them there.
        answers.put((rank, pickle.dumps(function(*arguments)), None))
        dist.destroy_process_group()
    except Exception as error:
        answers.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def start_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60
) -> list[tuple[Any, str | None]]:
    """Call `function(*arguments)` on `size` ranks; answers and errors come back in the order of ranks.

    `timeout` is that of the process group, in seconds. A rank that gives no answer has the error "no answer".
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = _context.Queue()
    ranks = [
        _context.Process(target=_rank_main, args=(rank, size, port, timeout, function, arguments, answers), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: list[tuple[Any, str | None]] = [(None, "no answer")] * size
    deadline = time.monotonic() + 2 * timeout + 30
    waiting = set(range(size))
    while waiting and time.monotonic() < deadline:
        try:
            rank, answer, error = answers.get(timeout=0.2)
        except queue.Empty:
            if any(ranks[rank].is_alive() for rank in waiting):
                continue
            break
        found[rank] = (None if answer is None else pickle.loads(answer), error)
        waiting.discard(rank)
    for process in ranks:
        process.join(timeout=5)
        process.kill()
    return found


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Like `start_ranks`, where every rank must succeed: only the answers."""
    found = start_ranks(size, function, *arguments)
    for rank, (_, error) in enumerate(found):
        assert error is None, f"rank {rank}: {error}"
    return [answer for answer, _ in found]

"""Calls functions on real gloo ranks and brings their answers back.

`run_ranks` is for tests in which every rank succeeds. Its ranks are started once and take one call after the other.
`start_ranks` is for faults: it starts ranks for one call. Every call has a process group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import logging
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

Answer = tuple[Any, str | None]  # what the function returned, or what went wrong

# A server process imports everything once and forks the ranks. A rank would otherwise import dynamo, which takes
# seconds, when it makes its first optimizer.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "numba", "cdgrab", "_inputs", "distributed._ranks"]
)
_call_numbers = itertools.count()


def _answer(
    port: int, name: str, rank: int, size: int, timeout: float, function: Callable[..., Any], arguments: Any
) -> Any:
    """What a rank does in a call. `name` keeps the keys of calls apart in the store that they share."""
    patience = timedelta(seconds=60)
    store = PrefixStore(name, TCPStore("127.0.0.1", port, timeout=patience))
    store.set(f"rank {rank}", "")  # the time-out of the process group counts from when all ranks are up
    store.wait([f"rank {other}" for other in range(size)], patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    return function(*arguments)


def _serve(pipe: Connection[bytes, bytes]) -> None:
    """Take calls until one fails or the other end of the pipe is closed."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    environment = dict(os.environ)
    loggers = [(logger, logger.level, [*logger.handlers]) for logger in map(logging.getLogger, ("", "cdgrab"))]
    gc.freeze()  # imported modules need not be looked through after every call
    with contextlib.suppress(EOFError):
        while True:
            torch.set_num_threads(1)
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            message = pipe.recv_bytes()
            try:
                # Pickled here, since tensors sent as they are live in memory of the process that sends them.
                pipe.send_bytes(pickle.dumps((_answer(*pickle.loads(message)), None)))
            except Exception as error:
                pipe.send_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
                return  # the others lose a peer
            pipe.recv_bytes()  # all ranks have answered: none needs the process group any more
            dist.destroy_process_group()
            gc.collect()
            os.environ.clear()
            os.environ.update(environment)
            for logger, level, handlers in loggers:
                logger.setLevel(level)
                logger.handlers[:] = handlers


class _Rank:
    """A process that serves calls, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, far = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@functools.cache
def _store() -> TCPStore:
    """Where ranks find each other, on a port that the system has chosen."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _call(ranks: list[_Rank], function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Answer]:
    name, size = f"call {next(_call_numbers)}", len(ranks)
    for index, rank in enumerate(ranks):
        call = (_store().port, name, index, size, timeout, function, arguments)
        rank.pipe.send_bytes(pickle.dumps(call))
    answers: list[Answer] = [(None, "no answer")] * size
    deadline = time.monotonic() + 2 * timeout + 30
    waiting: dict[Any, int] = {rank.pipe: index for index, rank in enumerate(ranks)}
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=1):
            index = waiting.pop(pipe)
            try:
                answers[index] = pickle.loads(ranks[index].pipe.recv_bytes())
            except EOFError:  # the process is gone
                continue
    return answers


def start_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Answer]:
    """Call `function(*arguments)` on `size` new ranks; answers and errors come back in the order of ranks.

    `timeout` is that of the process group, in seconds. A rank that gives no answer has the error "no answer".
    """
    ranks = [_Rank() for _ in range(size)]
    try:
        return _call(ranks, function, arguments, timeout)
    finally:
        for rank in ranks:
            rank.end()


_pool: list[_Rank] = []


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on `size` ranks, which must all succeed, and return their answers."""
    _pool.extend(_Rank() for _ in range(size - len(_pool)))
    try:
        answers = _call(_pool[:size], function, arguments, timeout=60)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
        assert not errors, "\n".join(errors)
        for rank in _pool[:size]:
            rank.pipe.send_bytes(b"")
    except BaseException:  # a rank may be anywhere
        end_ranks()
        raise
    return [answer for answer, _ in answers]


@atexit.register
def end_ranks() -> None:
    """End the ranks that `run_ranks` has kept."""
    while _pool:
        _pool.pop().end()

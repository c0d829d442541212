"""Many runs, one after the other or several at a time, with what they have come to on display."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import queue
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from rich.console import Console

from cdgrab_experiments.choices import command
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.interrupts import interruptible, stop_if_asked
from cdgrab_experiments.progress import Board
from cdgrab_experiments.records import EpochRecord, Run
from cdgrab_experiments.runner import Interrupted, Place, find_run, run
from cdgrab_experiments.writers import Writer

OnEpoch = Callable[[RunConfig, EpochRecord], None]


def run_all(
    todo: list[RunConfig], place: Place, console: Console, *, jobs: int = 1, writers: list[Writer] | None = None
) -> list[Run]:
    """Do what is left of all runs.

    Raises:
        Interrupted: On Ctrl-C; everything that was under way has been saved.
    """
    found: list[Run] = []
    there = {config for config in todo if _complete(config, place)}
    with Board(console, todo) as board:

        def on_epoch(config: RunConfig, record: EpochRecord) -> None:
            stop_if_asked()
            board.epoch(config, record)
            for write in [] if config in there else writers or []:
                write(config, record)

        def on_end(config: RunConfig, done: Run) -> None:
            board.finished(config, there=config in there)
            found.append(done)

        if jobs == 1:
            for config in todo:
                done = run(config, place, command=command(config), on_epoch=lambda r, c=config: on_epoch(c, r))  # type: ignore[misc]
                on_end(config, done)
        else:
            _side_by_side(todo, place, jobs, on_epoch, on_end)
    return found


def _complete(config: RunConfig, place: Place) -> bool:
    found = find_run(config, place)
    return found is not None and found.complete


def _side_by_side(
    todo: list[RunConfig],
    place: Place,
    jobs: int,
    on_epoch: OnEpoch,
    on_end: Callable[[RunConfig, Run], None],
) -> None:
    context = mp.get_context("spawn")
    with context.Manager() as manager:
        news: Any = manager.Queue()
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=interruptible)
        futures: dict[RunConfig, Future[Run]] = {
            config: pool.submit(_work, config, place, news, os.getpid()) for config in todo
        }
        try:
            pending = set(futures)
            while pending:
                stop_if_asked()
                try:
                    on_epoch(*news.get(timeout=0.2))
                    continue
                except queue.Empty:
                    pass
                for config in [config for config in todo if config in pending and futures[config].done()]:
                    pending.remove(config)
                    done = futures[config].result()
                    while not news.empty():
                        on_epoch(*news.get())
                    on_end(config, done)
        except BaseException as error:
            # Whether a run failed or the user has had enough: the others save themselves, and none is begun.
            for process in list(pool._processes.values()):
                with contextlib.suppress(OSError, AttributeError):
                    os.kill(process.pid or 0, signal.SIGINT)
            pool.shutdown(wait=True, cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise
            ended = [future.exception() for future in futures.values() if future.done() and not future.cancelled()]
            saved = [stop for stop in ended if isinstance(stop, Interrupted) and stop.path is not None]
            raise Interrupted(
                place.results if saved else None, max((stop.epochs for stop in saved), default=0)
            ) from None
        pool.shutdown()


def _work(config: RunConfig, place: Place, news: Any, parent: int) -> Run:
    def tell(record: EpochRecord) -> None:
        if os.getppid() != parent:  # nobody waits for this run any more
            raise KeyboardInterrupt
        stop_if_asked()
        news.put((config, record))

    return run(config, place, command=command(config), on_epoch=tell)

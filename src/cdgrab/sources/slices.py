"""Buckets of gradients through the `sharded` exchange: all-to-all, average of this rank's slice, all-gather.

Ranks send the same bytes as in an all-reduce, and a rank receives every rank's slice of the coordinates it owns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from cdgrab.exchange.collectives import slice_widths, start_all_gather
from cdgrab.exchange.sharded import ShardedPairs
from cdgrab.sources.layout import Bucket, Layout, redistribute
from cdgrab.sources.port import CountedStep, Port


class BucketSlices:
    """Exchanges and averages buckets, and hands the slices of all ranks to the sorter.

    A thread does the work beside the backward pass. It is a single one, because all ranks must start their collectives
    in the same order. On a GPU a stream replaces the thread.

    Args:
        port: The ordering's port.
        numels: Sizes of the parameters.
    """

    def __init__(self, port: Port, numels: list[int]) -> None:
        self._port, self._group = port, port.group
        self._store = _SliceStore(numels, port.group)
        # In a new thread PyTorch uses all cores, whatever its number of threads was set to.
        self._thread = ThreadPoolExecutor(1, "cdgrab", torch.set_num_threads, (torch.get_num_threads(),))
        self._jobs: list[Job[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._scratches: dict[str, Tensor] = {}

    def settle(self) -> None:
        """Wait for the thread's jobs; raise their errors."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def take(
        self,
        sorter: ShardedPairs,
        numbers: Bucket,
        bucket: GradBucket,
        averaging: Callable[[GradBucket], Future[Tensor]] | None,
    ) -> Future[Tensor]:
        """Take a bucket of the parameters with these numbers; return its average, by the user's hook if any."""
        buffer = bucket.buffer()
        self._store.follow(sorter)
        step = self._port.count_step() if bucket.is_last() else None
        if averaging is not None:
            # The user's hook starts collectives, whose order must not mix with those of another thread.
            slices = self._scatter(numbers, buffer)
            averaged = averaging(bucket)
            self._hand_over(numbers, slices)
            self._end_step(step)
            return averaged
        return self._on_stream(numbers, buffer, step) if buffer.is_cuda else self._on_thread(numbers, buffer, step)

    def _on_thread(self, numbers: Bucket, buffer: Tensor, step: CountedStep | None) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        # Ending an epoch takes collectives, and a rank that has left its loop may close its connections. So the last
        # backward pass waits for them. Within an epoch, signs have time until the next step needs the store.
        ends_epoch = step is not None and step.ends_epoch

        def job() -> None:
            try:
                self._exchange(numbers, buffer)
                if ends_epoch:
                    self._end_step(step)
            except BaseException as error:
                future.set_exception(error)  # type: ignore[arg-type]
                raise
            future.set_result(buffer)
            if not ends_epoch:
                self._end_step(step)

        self._jobs = [job for job in self._jobs if not job.done() or job.exception()]
        self._jobs.append(self._thread.submit(job))
        return future

    def _on_stream(self, numbers: Bucket, buffer: Tensor, step: CountedStep | None) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        future: Future[Tensor] = Future(devices=[buffer.device])
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            self._exchange(numbers, buffer)
            future.set_result(buffer)
            self._end_step(step)
        return future

    def _exchange(self, numbers: Bucket, buffer: Tensor) -> None:
        """Average the bucket; hand its slices to the sorter while the all-gather runs."""
        slices = self._scatter(numbers, buffer)
        finish = self._gather_average(buffer, slices)
        self._hand_over(numbers, slices)
        finish()

    def _scatter(self, numbers: Bucket, buffer: Tensor) -> Tensor:
        """Return every rank's slice of this rank's coordinates, after an all-to-all."""
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        widths = slice_widths(buffer.numel(), size)
        width = widths[rank]
        slices = self._store.room(numbers, width, buffer)
        if slices is None:
            slices = self._scratch("slices", size * width, buffer, buffer.dtype).view(size, width)
        dist.all_to_all_single(slices.view(-1), buffer, [width] * size, widths, group=self._group)
        self._port.sent(buffer.element_size() * (buffer.numel() - width))
        return slices

    def _gather_average(self, buffer: Tensor, slices: Tensor) -> Callable[[], None]:
        """Start to fill `buffer` with the mean of all ranks' gradients. Call the returned function to wait for it."""
        size, width = slices.shape
        # The mean of half-precision numbers is taken in single precision.
        wide = torch.promote_types(slices.dtype, torch.float32)
        mean = torch.mean(slices, 0, dtype=wide, out=self._scratch("mean", width, buffer, wide)).to(buffer.dtype)
        self._port.sent(buffer.element_size() * (size - 1) * width)
        return start_all_gather(buffer, mean, self._group)

    def _hand_over(self, numbers: Bucket, slices: Tensor) -> None:
        """Pass the slices to the sorter."""
        with self._port.timed():
            self._store.put(numbers, slices)

    def _end_step(self, step: CountedStep | None) -> None:
        """End the step, if this was its last bucket."""
        if step is None:
            return
        with self._port.timed():
            self._store.end_step(step)
        if step.ends_epoch:
            self._port.end_epoch_if_due()

    def _scratch(self, what: str, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory that is kept from bucket to bucket: allocating it costs as much as filling it."""
        scratch = self._scratches.get(what)
        if scratch is None or scratch.numel() < numel or scratch.dtype != dtype:
            scratch = self._scratches[what] = like.new_empty(numel, dtype=dtype)
        return scratch[:numel]


class _SliceStore:
    """Passes slices to the sorter, and moves its store to other buckets: DDP rebuilds them after the first step.

    Attributes:
        sorter: Takes slices.
    """

    sorter: ShardedPairs

    def __init__(self, numels: list[int], group: dist.ProcessGroup | None) -> None:
        self._numels, self._group = numels, group
        self._stored: list[Bucket] = []  # buckets of the sorter's store; empty before its first step
        self._arrived: list[Bucket] = []  # buckets of the step under way
        self._stash: list[tuple[Bucket, Tensor]] = []  # slices of buckets that are not in the store

    def follow(self, sorter: ShardedPairs) -> None:
        """Use this sorter from now on. A new one may have a loaded state, with the buckets of another run."""
        if getattr(self, "sorter", None) is not sorter:
            self.sorter = sorter
            self._stored = list(sorter.store)

    def room(self, numbers: Bucket, width: int, like: Tensor) -> Tensor | None:
        """The sorter's tensor to write a bucket's slices into, or None if it does not store them as they are."""
        room = self.sorter.room(numbers, width, like) if self._has_place(numbers) else None
        return room if room is not None and room.dtype == like.dtype else None

    def put(self, numbers: Bucket, slices: Tensor) -> None:
        """Take the slices of a bucket."""
        if self._has_place(numbers):
            self.sorter.put(numbers, slices)
        else:
            self._stash.append((numbers, slices.clone()))  # the next bucket overwrites `slices`
        self._arrived.append(numbers)

    def end_step(self, step: CountedStep) -> None:
        """End a step whose buckets have all come."""
        if self._stash:
            self._move()
        self._stored, self._arrived = self._arrived, []
        self.sorter.end_visit(step.counts_L)

    def _has_place(self, numbers: Bucket) -> bool:
        return not self._stored or numbers in self._stored

    def _move(self) -> None:
        """Move the store to the rebuilt buckets, then take the stashed slices."""
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        old, new = (Layout(self._numels, buckets, size) for buckets in (self._stored, self._arrived))
        moved = redistribute(self.sorter.lift(), old, new, self._group)
        widths = [slice_widths(sum(self._numels[number] for number in b), size)[rank] for b in self._arrived]
        self.sorter.lay_down(dict(zip(self._arrived, moved.split(widths, dim=1), strict=True)))
        stash, self._stash = self._stash, []
        for numbers, slices in stash:
            self.sorter.put(numbers, slices)

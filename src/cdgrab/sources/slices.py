"""Buckets of gradients through the `sharded` exchange: all-to-all, average of this rank's slice, all-gather.

The same bytes as an all-reduce, and every rank has seen every rank's slice of the coordinates it owns.
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

    Work on a bucket is given to one thread, so that it goes on beside the backward pass; one thread, because all ranks
    must start their collectives in the same order. On a GPU a stream of its own takes the thread's place.

    Args:
        port: To the ordering.
        numels: Sizes of the parameters.
    """

    def __init__(self, port: Port, numels: list[int]) -> None:
        self._port, self._group = port, port.group
        self._store = _SliceStore(numels, port.group)
        # A new thread starts with as many threads of its own as there are cores, whatever PyTorch was told.
        self._thread = ThreadPoolExecutor(1, "cdgrab", torch.set_num_threads, (torch.get_num_threads(),))
        self._jobs: list[Job[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._kept: dict[str, Tensor] = {}

    def settle(self) -> None:
        """Wait for what the thread has to do."""
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
        """Take a bucket of the parameters with these numbers; gives its average, by a hook of the user's if any."""
        buffer = bucket.buffer()
        self._store.follow(sorter)
        step = self._port.count_step() if bucket.is_last() else None
        if averaging is not None:
            # The user's hook starts collectives of its own; they must not mix with those of another thread.
            slices = self._scatter(numbers, buffer)
            averaged = averaging(bucket)
            self._hand_over(numbers, slices)
            self._end_step(step)
            return averaged
        return self._on_stream(numbers, buffer, step) if buffer.is_cuda else self._on_thread(numbers, buffer, step)

    def _on_thread(self, numbers: Bucket, buffer: Tensor, step: CountedStep | None) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        # Ending an epoch takes collectives, and a rank that has left its loop may close its connections. So the pass
        # waits for them. Within an epoch training goes on, and the signs have time until the next step needs the store.
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
        """Average the bucket; its slices are balanced while the averages are under way."""
        slices = self._scatter(numbers, buffer)
        finish = self._gather_average(buffer, slices)
        self._hand_over(numbers, slices)
        finish()

    def _scatter(self, numbers: Bucket, buffer: Tensor) -> Tensor:
        """Every rank's slice of this rank's coordinates."""
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
        """What DDP wants: the mean of all ranks' gradients, everywhere; there once what is returned was called."""
        size, width = slices.shape
        # The mean of half-precision numbers is taken in single precision.
        wide = torch.promote_types(slices.dtype, torch.float32)
        mean = torch.mean(slices, 0, dtype=wide, out=self._scratch("mean", width, buffer, wide)).to(buffer.dtype)
        self._port.sent(buffer.element_size() * (size - 1) * width)
        return start_all_gather(buffer, mean, self._group)

    def _hand_over(self, numbers: Bucket, slices: Tensor) -> None:
        """Give the slices to the sorter."""
        with self._port.timed():
            self._store.put(numbers, slices)

    def _end_step(self, step: CountedStep | None) -> None:
        """With the last bucket the step ends."""
        if step is None:
            return
        with self._port.timed():
            self._store.end_step(step)
        if step.ends_epoch:
            self._port.end_epoch_if_due()

    def _scratch(self, what: str, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room that is kept from bucket to bucket: allocating it anew costs as much as filling it."""
        kept = self._kept.get(what)
        if kept is None or kept.numel() < numel or kept.dtype != dtype:
            kept = self._kept[what] = like.new_empty(numel, dtype=dtype)
        return kept[:numel]


class _SliceStore:
    """The sorter, and in which buckets it stores coordinates: DDP rebuilds them after the first step.

    Attributes:
        sorter: Takes slices.
    """

    sorter: ShardedPairs

    def __init__(self, numels: list[int], group: dist.ProcessGroup | None) -> None:
        self._numels, self._group = numels, group
        self._stored: list[Bucket] = []  # of what the sorter stores; empty before its first step
        self._arrived: list[Bucket] = []  # of the step under way
        self._stash: list[tuple[Bucket, Tensor]] = []  # slices that the store has no place for yet

    def follow(self, sorter: ShardedPairs) -> None:
        """The sorter in use; a new one may have a loaded state, whose buckets may be those of another run."""
        if getattr(self, "sorter", None) is not sorter:
            self.sorter = sorter
            self._stored = list(sorter.store)

    def room(self, numbers: Bucket, width: int, like: Tensor) -> Tensor | None:
        """Where slices like these may be written, if the sorter wants to store them as they are."""
        room = self.sorter.room(numbers, width, like) if self._has_place(numbers) else None
        return room if room is not None and room.dtype == like.dtype else None

    def put(self, numbers: Bucket, slices: Tensor) -> None:
        """Take the slices of a bucket."""
        if self._has_place(numbers):
            self.sorter.put(numbers, slices)
        else:
            self._stash.append((numbers, slices.clone()))  # the next bucket will overwrite them
        self._arrived.append(numbers)

    def end_step(self, step: CountedStep) -> None:
        """All buckets have come."""
        if self._stash:
            self._move()
        self._stored, self._arrived = self._arrived, []
        self.sorter.end_visit(step.counts_L)

    def _has_place(self, numbers: Bucket) -> bool:
        return not self._stored or numbers in self._stored

    def _move(self) -> None:
        """The buckets have been rebuilt: move what is stored to the new ones, then take the stashed slices."""
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        old, new = (Layout(self._numels, buckets, size) for buckets in (self._stored, self._arrived))
        moved = redistribute(self.sorter.lift(), old, new, self._group)
        widths = [slice_widths(sum(self._numels[number] for number in b), size)[rank] for b in self._arrived]
        self.sorter.lay_down(dict(zip(self._arrived, moved.split(widths, dim=1), strict=True)))
        stash, self._stash = self._stash, []
        for numbers, slices in stash:
            self.sorter.put(numbers, slices)

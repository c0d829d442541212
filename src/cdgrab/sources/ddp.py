"""`DistributedDataParallel`: gradients are balanced on their way to the average.

With the `sharded` exchange the hook takes the place of the all-reduce: all-to-all, average of this rank's slice,
all-gather. The same bytes, and every rank has seen every rank's slice. With any other exchange it copies the bucket
and leaves averaging to the usual all-reduce. A hook of the user's own can do the averaging in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from cdgrab.exchange import ShardedPairs
from cdgrab.exchange.collectives import slice_widths, start_all_gather
from cdgrab.sources import CountedStep
from cdgrab.sources.layout import Bucket, Layout, redistribute

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering

CommHook = Callable[[Any, GradBucket], Future[Tensor]]


class DdpAttachment:
    """State of the hook, and the hook itself.

    Work on a bucket is handed to one thread, so that it goes on beside the backward pass; one thread, because all ranks
    must start their collectives in the same order. On a GPU a stream of its own takes the thread's place.
    """

    def __init__(
        self,
        ordering: Ordering,
        model: DistributedDataParallel,
        hook: CommHook | None,
        hook_state: Any,
    ) -> None:
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._ordering = ordering
        self._group = ordering._connection.group
        self._ddp_group = model.process_group
        self._averaging = hook
        self._averaging_state = hook_state
        self._numels = [p.numel() for p in parameters]
        self._number = {id(p): number for number, p in enumerate(parameters)}
        self._active = True
        self._row = torch.zeros(0)
        # A new thread starts with as many threads of its own as there are cores, whatever PyTorch was told.
        self._thread = ThreadPoolExecutor(1, "cdgrab", torch.set_num_threads, (torch.get_num_threads(),))
        self._jobs: list[Job[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._arrived: list[Bucket] = []  # buckets of the step under way
        self._stored: list[Bucket] = []  # buckets of what the sorter stores; empty before its first step
        self._sorter: ShardedPairs | None = None
        self._kept: dict[str, Tensor] = {}
        self._stash: list[tuple[Bucket, Tensor]] = []  # slices that the store has no place for yet
        model.register_comm_hook(self, _order_hook)

    def detach(self) -> None:
        self.settle()
        self._active = False

    def settle(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        if not self._active:
            return self._average(bucket)
        sorter = self._ordering._attached_sorter()
        if isinstance(sorter, ShardedPairs):
            return self._through_slices(sorter, bucket)
        if sorter is not None:
            self._copy(bucket)
        averaged = self._average(bucket)
        if bucket.is_last():
            self._ordering._observe_attached(None if sorter is None else self._row)
        return averaged

    def _average(self, bucket: GradBucket) -> Future[Tensor]:
        if self._averaging is not None:
            return self._averaging(self._averaging_state, bucket)
        return allreduce_hook(self._ddp_group, bucket)

    def _copy(self, bucket: GradBucket) -> None:
        """Put the bucket's gradients where they belong in the row, before they are averaged away."""
        buffer = bucket.buffer()
        if self._row.numel() == 0:
            dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
            self._row = torch.zeros(sum(self._numels), dtype=dtype, device=buffer.device)
        parts = self._row.split(self._numels)
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            parts[self._number[id(parameter)]].copy_(grad.reshape(-1))

    # The sharded way

    def _through_slices(self, sorter: ShardedPairs, bucket: GradBucket) -> Future[Tensor]:
        buffer, last = bucket.buffer(), bucket.is_last()
        if sorter is not self._sorter:
            # A new one, perhaps with a loaded state, whose buckets may be those of another run.
            self._sorter = sorter
            self._stored = list(sorter.differences)
        numbers = tuple(self._number[id(parameter)] for parameter in bucket.parameters())
        step = self._ordering._count_step() if last else None
        if self._averaging is not None:
            # The user's hook starts collectives of its own; they must not mix with those of another thread.
            slices = self._scatter(sorter, numbers, buffer)
            averaged = self._averaging(self._averaging_state, bucket)
            self._hand_over(sorter, numbers, slices)
            self._end_step(sorter, step)
            return averaged
        if buffer.is_cuda:
            return self._on_stream(sorter, numbers, buffer, step)
        future: Future[Tensor] = Future()

        # Ending an epoch takes collectives, and a rank that has left its loop may close its connections. So the pass
        # waits for them. Within an epoch training goes on, and the signs have time until the next step needs the store.
        ends_epoch = step is not None and step.ends_epoch

        def job() -> None:
            try:
                self._exchange(sorter, numbers, buffer)
                if ends_epoch:
                    self._end_step(sorter, step)
            except BaseException as error:
                future.set_exception(error)  # type: ignore[arg-type]
                raise
            future.set_result(buffer)
            if not ends_epoch:
                self._end_step(sorter, step)

        self._jobs = [job for job in self._jobs if not job.done() or job.exception()]
        self._jobs.append(self._thread.submit(job))
        return future

    def _on_stream(
        self, sorter: ShardedPairs, numbers: Bucket, buffer: Tensor, step: CountedStep | None
    ) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        future: Future[Tensor] = Future(devices=[buffer.device])
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            self._exchange(sorter, numbers, buffer)
            future.set_result(buffer)
            self._end_step(sorter, step)
        return future

    def _exchange(self, sorter: ShardedPairs, numbers: Bucket, buffer: Tensor) -> None:
        """Average the bucket; its slices are balanced while the averages are under way."""
        slices = self._scatter(sorter, numbers, buffer)
        finish = self._gather_average(buffer, slices)
        self._hand_over(sorter, numbers, slices)
        finish()

    def _scatter(self, sorter: ShardedPairs, numbers: Bucket, buffer: Tensor) -> Tensor:
        """Every rank's slice of this rank's coordinates."""
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        widths = slice_widths(buffer.numel(), size)
        width = widths[rank]
        slices = None
        if self._has_place(numbers):
            room = sorter.room(numbers, width, buffer)
            slices = room if room is not None and room.dtype == buffer.dtype else None
        if slices is None:
            slices = self._scratch("slices", size * width, buffer).view(size, width)
        dist.all_to_all_single(slices.view(-1), buffer, [width] * size, widths, group=self._group)
        self._ordering._connection.exchange.bytes_sent += buffer.element_size() * (buffer.numel() - width)
        return slices

    def _gather_average(self, buffer: Tensor, slices: Tensor) -> Callable[[], None]:
        """What DDP wants: the mean of all ranks' gradients, everywhere; there once what is returned was called."""
        size, width = slices.shape
        # The mean of half-precision numbers is taken in single precision.
        wide = torch.promote_types(slices.dtype, torch.float32)
        mean = torch.mean(slices, 0, dtype=wide, out=self._scratch("mean", width, buffer, wide)).to(buffer.dtype)
        self._ordering._connection.exchange.bytes_sent += buffer.element_size() * (size - 1) * width
        return start_all_gather(buffer, mean, self._group)

    def _hand_over(self, sorter: ShardedPairs, numbers: Bucket, slices: Tensor) -> None:
        """Give the slices to the sorter."""
        with self._ordering._meter.timed():
            if self._has_place(numbers):
                sorter.put(numbers, slices)
            else:
                self._stash.append((numbers, slices.clone()))  # the next bucket will overwrite them
            self._arrived.append(numbers)

    def _end_step(self, sorter: ShardedPairs, step: CountedStep | None) -> None:
        """With the last bucket the step ends."""
        if step is None:
            return
        with self._ordering._meter.timed():
            if self._stash:
                self._move(sorter)
            self._stored, self._arrived = self._arrived, []
            sorter.end_visit(step.counts_L)
        if step.ends_epoch:
            self._ordering._end_epoch_if_due()

    def _scratch(self, what: str, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Room that is kept from bucket to bucket: allocating it anew costs as much as filling it."""
        kept = self._kept.get(what)
        if kept is None or kept.numel() < numel or kept.dtype != (dtype or like.dtype):
            kept = self._kept[what] = like.new_empty(numel, dtype=dtype or like.dtype)
        return kept[:numel]

    def _has_place(self, numbers: Bucket) -> bool:
        return not self._stored or numbers in self._stored

    def _move(self, sorter: ShardedPairs) -> None:
        """The buckets have been rebuilt: move what is stored to the new ones, then take the stashed slices."""
        sorter.resolve()
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        old, new = (Layout(self._numels, buckets, size) for buckets in (self._stored, self._arrived))
        pieces = list(sorter.differences)
        stored = torch.cat(
            [torch.cat([sorter.differences[piece], sorter.running_sum[piece][None]]) for piece in pieces], dim=1
        )
        moved = redistribute(stored, old, new, self._group)
        sorter.differences.clear()
        sorter.running_sum.clear()
        start = 0
        for numbers in self._arrived:
            width = slice_widths(sum(self._numels[number] for number in numbers), size)[rank]
            part = moved[:, start : start + width]
            sorter.differences[numbers] = part[:-1].clone()
            sorter.running_sum[numbers] = part[-1].clone()
            start += width
        stash, self._stash = self._stash, []
        for numbers, slices in stash:
            sorter.put(numbers, slices)


def _order_hook(state, bucket):  # type: ignore[no-untyped-def]
    # DDP compares annotations with the types themselves, and ours are strings: hence none.
    return state(bucket)

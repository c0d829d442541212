"""`DistributedDataParallel`: gradients are balanced on their way to the average.

With the `sharded` exchange the hook takes the place of the all-reduce (`slices.py`). With any other exchange it copies
the bucket and leaves averaging to the usual all-reduce. A hook of the user's own can do the averaging in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from cdgrab.sources.port import Port
from cdgrab.sources.slices import BucketSlices

CommHook = Callable[[Any, GradBucket], Future[Tensor]]


class DdpAttachment:
    """Takes every bucket of gradients, and gives its average.

    Args:
        port: To the ordering.
        model: Whose gradients are averaged.
        slot: Hands the buckets over.
        hook: Of the user's, which averages; None for the usual all-reduce.
        hook_state: Its state.
    """

    def __init__(
        self, port: Port, model: DistributedDataParallel, slot: HookSlot, hook: CommHook | None, hook_state: Any
    ) -> None:
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._port, self._slot = port, slot
        self._numbers = {id(p): number for number, p in enumerate(parameters)}
        self._row = _BucketRow(parameters)
        self._slices = BucketSlices(port, [p.numel() for p in parameters])
        slot.averaging, slot.state = hook, hook_state
        slot.take = self

    def detach(self) -> None:
        self.settle()
        self._slot.take = None

    def settle(self) -> None:
        self._slices.settle()

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        port, last = self._port, bucket.is_last()
        if port.is_over:
            self.settle()  # the job that ends the epoch
        numbers = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        sorter = port.slices
        if sorter is not None:
            averaging = None if self._slot.averaging is None else self._slot.average
            return self._slices.take(sorter, tuple(numbers), bucket, averaging)
        if port.balances:
            self._row.copy(numbers, bucket)
        averaged = self._slot.average(bucket)
        if last and port.balances:
            port.observe(self._row.row_D)
        elif last:
            port.count_step()
            port.end_epoch_if_due()
        return averaged


class HookSlot:
    """What a wrapped model calls for every bucket. It stays when an ordering is detached: a hook cannot be taken back.

    Attributes:
        take: The source at work, if there is one.
        averaging: A hook of the user's that averages.
        state: Its state.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.take: DdpAttachment | None = None
        self.averaging: CommHook | None = None
        self.state: Any = None

    @classmethod
    def of(cls, model: DistributedDataParallel) -> HookSlot:
        """The slot of a model, new or left by an earlier source; raises `ValueError` if somebody else has a hook."""
        for hook, state in model._comm_hooks:
            if isinstance(state, HookSlot):
                if state.take is not None:
                    raise ValueError("another ordering is attached to the model; call its detach() first")
                return state
            if hook is not _order_hook:  # which a copy of an attached model has left, without effect
                raise ValueError(
                    "the model has a communication hook already, and DistributedDataParallel takes only one; give that "
                    "hook to attach(model, hook=..., hook_state=...) instead of registering it"
                )
        slot = cls(model.process_group)
        model.register_comm_hook(slot, _order_hook)
        return slot

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        return self.average(bucket) if self.take is None else self.take(bucket)

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """The average over all ranks, without ordering."""
        if self.averaging is not None:
            return self.averaging(self.state, bucket)
        return allreduce_hook(self._group, bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # nothing of it belongs into a file or a copy


class _BucketRow:
    """A whole gradient, put together from buckets."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._numels = [p.numel() for p in parameters]
        self.row_D = torch.zeros(0)

    def copy(self, numbers: list[int], bucket: GradBucket) -> None:
        """Put the bucket's gradients where they belong in the row, before they are averaged away."""
        buffer = bucket.buffer()
        if self.row_D.numel() == 0:
            dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
            self.row_D = torch.zeros(sum(self._numels), dtype=dtype, device=buffer.device)
        parts = self.row_D.split(self._numels)
        for number, grad in zip(numbers, bucket.gradients(), strict=True):
            parts[number].copy_(grad.reshape(-1))


def _order_hook(state, bucket):  # type: ignore[no-untyped-def]
    # DDP compares annotations with the types themselves, and ours are strings: hence none.
    return state(bucket)

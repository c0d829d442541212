"""`DistributedDataParallel`: a communication hook takes the gradients before they are averaged.

With the `sharded` exchange the hook replaces the all-reduce (`slices.py`). With any other exchange it copies the bucket
and leaves averaging to the usual all-reduce. In both cases a hook of the user's can do the averaging.
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
    """Takes every bucket of gradients, and returns its average.

    Args:
        port: The ordering's port.
        model: The wrapped model.
        slot: Hands the buckets over.
        hook: The user's hook, which averages; None for the usual all-reduce.
        hook_state: The state of that hook.
    """

    def __init__(
        self, port: Port, model: DistributedDataParallel, slot: HookSlot, hook: CommHook | None, hook_state: Any
    ) -> None:
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._port, self._slot = port, slot
        self._numbers = {id(p): number for number, p in enumerate(parameters)}
        self._row = _RowBuffer(parameters)
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
            self.settle()  # wait for the job that ends the epoch
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
    """The model's communication hook. DDP cannot remove a hook, so the slot stays when an ordering is detached.

    Attributes:
        take: The attachment that takes buckets, or None.
        averaging: The user's hook that averages, or None.
        state: The state of that hook.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.take: DdpAttachment | None = None
        self.averaging: CommHook | None = None
        self.state: Any = None

    @classmethod
    def of(cls, model: DistributedDataParallel) -> HookSlot:
        """The slot of a model, new or left by an earlier source; raises `ValueError` if the model has another hook."""
        for hook, state in model._comm_hooks:
            if isinstance(state, HookSlot):
                if state.take is not None:
                    raise ValueError("another ordering is attached to the model; call its detach() first")
                return state
            if hook is not _order_hook:  # a copy of an attached model has this one, without effect
                raise ValueError(
                    "the model has a communication hook already, and DistributedDataParallel takes only one; pass that "
                    "hook to attach(model, hook=..., hook_state=...) instead of registering it"
                )
        slot = cls(model.process_group)
        model.register_comm_hook(slot, _order_hook)
        return slot

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        return self.average(bucket) if self.take is None else self.take(bucket)

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket over all ranks, without ordering."""
        if self.averaging is not None:
            return self.averaging(self.state, bucket)
        return allreduce_hook(self._group, bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # files and copies hold None instead


class _RowBuffer:
    """Assembles a whole gradient from buckets."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._numels = [p.numel() for p in parameters]
        self.row_D = torch.zeros(0)

    def copy(self, numbers: list[int], bucket: GradBucket) -> None:
        """Copy the bucket's gradients to their places in the row, before they are averaged in place."""
        buffer = bucket.buffer()
        if self.row_D.numel() == 0:
            dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
            self.row_D = torch.zeros(sum(self._numels), dtype=dtype, device=buffer.device)
        parts = self.row_D.split(self._numels)
        for number, grad in zip(numbers, bucket.gradients(), strict=True):
            parts[number].copy_(grad.reshape(-1))


def _order_hook(state, bucket):  # type: ignore[no-untyped-def]
    # No annotations: DDP compares them with types, and ours are strings.
    return state(bucket)

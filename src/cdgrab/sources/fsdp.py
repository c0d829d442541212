"""FSDP2 (`fully_shard`): its reduce-scatter becomes an all-to-all followed by a local sum.

The same bytes leave every rank, and the sharded gradient is the same up to rounding. In between, a rank has every
rank's slice of the parameters it owns. Every wrapped module is a bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cdgrab.per_example.engine import at_end_of_pass, current_pass
from cdgrab.sources.port import Port


class FsdpAttachment:
    """Replaces the reduce-scatter of every wrapped module."""

    def __init__(self, port: Port, model: nn.Module) -> None:
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ValueError(
                f"whole batches under fully_shard need torch 2.9 or newer, and this is torch {torch.__version__}; "
                "upgrade torch, order single examples (source='sketch'), or use DistributedDataParallel"
            )
        self._port = port
        self._task: int | None = None  # the backward pass whose end has a callback
        self._stream: torch.cuda.Stream | None = None
        wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._modules = [module for module in wrapped if param_groups(module)]  # the others have nothing to reduce
        self._before = [param_groups(module)[0]._reduce_scatter_comm for module in self._modules]
        for number, module in enumerate(self._modules):
            # FSDP's base class is private; an object with the same methods will do.
            comm: Any = _BalancedReduceScatter(self, number, self._before[number])
            module.set_custom_reduce_scatter(comm)

    def settle(self) -> None:
        pass

    def detach(self) -> None:
        for module, comm in zip(self._modules, self._before, strict=True):
            module.set_custom_reduce_scatter(comm)

    def take(self, bucket: int, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Reduce-scatter `input` into `output`, and hand every rank's slice to the sorter."""
        if input.is_cuda:
            self._stream = torch.cuda.current_stream(input.device)
        task = current_pass()
        if task != self._task:
            # At the end of this backward pass all modules have been reduced.
            self._task = task
            at_end_of_pass(self._on_end_of_backward)
        size = dist.get_world_size(group)
        slices = input.new_empty(size, output.numel())
        dist.all_to_all_single(slices.view(-1), input, group=group)
        total = slices.to(torch.promote_types(slices.dtype, torch.float32)).sum(0)
        if op == dist.ReduceOp.AVG:
            total /= size
        elif op != dist.ReduceOp.SUM:
            raise ValueError(f"FSDP asks for the reduction {op}; only SUM and AVG are supported")
        output.copy_(total)
        self._port.sent(input.element_size() * (size - 1) * output.numel())
        sorter = self._port.slices
        if sorter is not None:
            with self._port.timed():
                sorter.put(bucket, slices)

    def _on_end_of_backward(self) -> None:
        self._task = None
        sorter, step = self._port.slices, self._port.count_step()
        # On a GPU FSDP reduces modules on a stream of its own; what follows must come after that.
        with torch.cuda.stream(self._stream), self._port.timed():
            if sorter is not None:
                sorter.end_visit(step.counts_L)
        with torch.cuda.stream(self._stream):
            self._port.end_epoch_if_due()


def param_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups that a wrapped module reduces itself; none if modules wrapped inside it own them all."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class _BalancedReduceScatter:
    """Implements FSDP's interface of a reduce-scatter; the one it replaces allocates its memory."""

    def __init__(self, attachment: FsdpAttachment, bucket: int, before: Any) -> None:
        self._attachment = attachment
        self._bucket = bucket
        self._before = before

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated: Tensor = self._before.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op, "fully_shard never sets it"
        self._attachment.take(self._bucket, output_tensor, input_tensor, group, op)

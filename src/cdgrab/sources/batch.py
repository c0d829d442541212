"""The source `"batch"`: a unit's gradient is what a backward pass leaves, in a plain or a wrapped model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cdgrab.sources.port import Attachment, Port
from cdgrab.sources.wrappers import check_same_model, digest_of, is_fully_sharded, unwrapped


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Takes gradients of whole batches: a unit is a batch, or several that are accumulated.

    Args:
        hook: A communication hook that averages gradients instead of the all-reduce (`DistributedDataParallel` only).
        hook_state: The state of that hook.
    """

    hook: Callable[..., Any] | None = None
    hook_state: Any = None

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """Attach to a plain module, or to one wrapped for several ranks."""
        settings, model = port.settings, unwrapped(model)
        if port.balances and settings.unit_size % settings.batch_size:
            if not port.make_batches_units():
                raise ValueError(
                    f"unit_size is {settings.unit_size}, but a backward pass gives one gradient for the whole batch of "
                    f"{settings.batch_size}; make the ordering with unit_size={settings.batch_size}, or take single "
                    "examples: unit_size=1 and attach(model, source='sketch')"
                )
            settings = port.settings
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        trained = {name: p.shape for name, p in inner.named_parameters() if p.requires_grad}
        port.expect(None, model=digest_of(trained))
        if isinstance(model, DistributedDataParallel):
            return self._attach_ddp(port, model)
        if self.hook is not None:
            raise ValueError(f"hook= is for DistributedDataParallel; {type(model).__name__} has no communication hook")
        if is_fully_sharded(model) and settings.world.size > 1:
            return _attach_fsdp(port, model)
        if settings.world.size > 1:
            raise ValueError(
                f"{type(model).__name__} is not wrapped, but there are {settings.world.size} ranks; wrap it in "
                "DistributedDataParallel or apply fully_shard first, then attach"
            )
        from cdgrab.sources.module import ModuleAttachment

        return ModuleAttachment(port, model, max(1, settings.unit_size // settings.batch_size))

    def _attach_ddp(self, port: Port, model: DistributedDataParallel) -> Attachment:
        from cdgrab.sources.ddp import DdpAttachment, HookSlot

        slot = HookSlot.of(model)
        ranks, expected = dist.get_world_size(model.process_group), port.settings.world.size
        if ranks != expected:
            raise ValueError(
                f"the model is shared by {ranks} ranks, the ordering by {expected}; give both the same process group"
            )
        check_same_model(model.module, model.process_group)
        return DdpAttachment(port, model, slot, self.hook, self.hook_state)


def _attach_fsdp(port: Port, model: nn.Module) -> Attachment:
    from torch.distributed.fsdp import FSDPModule

    from cdgrab.sources.fsdp import FsdpAttachment, param_groups

    if port.balances and port.slices is None:
        raise ValueError(
            f"with fully_shard no rank ever has a whole gradient, which order {port.settings.order!r} with this "
            "exchange needs; use order 'cd-grab' with exchange 'sharded'"
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                if group.mesh_info.mesh.ndim > 1:
                    raise ValueError(
                        f"{name or 'the model'} is sharded over a mesh of several dimensions; shard it over one"
                    )
    check_same_model(model, port.group)
    return FsdpAttachment(port, model)

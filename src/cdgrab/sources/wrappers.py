"""Removes the wrappers of other libraries from a model, and refuses those it cannot remove."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from cdgrab.exchange.agreement import check_same


def unwrapped(model: nn.Module, *, compiled: bool = True) -> nn.Module:
    """The model without wrappers that only forward to it: Lightning Fabric's, and `torch.compile`'s if `compiled`.

    `DistributedDataParallel` and `fully_shard` stay, since they decide how gradients are averaged.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach() was given a {type(model).__name__}; expected a torch.nn.Module")
    while True:
        # By attribute and name: naming the classes would import the compiler, or Lightning.
        fabric = type(model).__name__ == "_FabricModule"
        inner = getattr(model, "_forward_module" if fabric else "_orig_mod", None) if fabric or compiled else None
        if inner is None:
            break
        model = inner
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is split by DeepSpeed's ZeRO-3, so that no rank has whole layers; use ZeRO 0 to "
            "2, or fully_shard (torch.distributed.fsdp)"
        )
    for kind in type(model).__mro__:
        if kind.__name__ in _REFUSED:
            raise ValueError(f"{type(model).__name__} cannot be attached: {_REFUSED[kind.__name__]}")
    return model


_REFUSED = {
    "FullyShardedDataParallel": "it keeps gradients in flat parameters of its own; use fully_shard "
    "(torch.distributed.fsdp), or DistributedDataParallel",
    "DeepSpeedEngine": "it averages gradients by itself; attach engine.module with source='sketch', or use "
    "DistributedDataParallel",
    "DataParallel": "it splits batches among threads of one process; use DistributedDataParallel",
}


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are spread over ranks, by `fully_shard` or among tensor-parallel peers."""
    return is_fully_sharded(model) or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to the model or a part of it."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def digest_of(shapes: Mapping[str, Sequence[int]]) -> str:
    """A short digest of the names and shapes of parameters, in order."""
    return f"{zlib.crc32(str([(name, *shape) for name, shape in shapes.items()]).encode()):08x}"


def check_same_model(model: nn.Module, group: dist.ProcessGroup | None, **more: Any) -> None:
    """Raise `ValueError` on every rank if ranks train different parameters, or have different options."""
    layout = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters() if p.requires_grad]
    mine = {
        "the number of trainable parameters": len(layout),
        "the number of their elements": sum(math.prod(shape) for _, shape, _ in layout),
        "the names, shapes and types of parameters (a digest)": zlib.crc32(str(layout).encode()),
        **more,
    }
    check_same("the model", mine, group)

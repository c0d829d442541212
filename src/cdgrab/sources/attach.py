"""Which attachment a model needs, and why one that cannot be served is refused."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from cdgrab.exchange import ShardedPairs
from cdgrab.exchange.agreement import check_same
from cdgrab.intake import Sketched
from cdgrab.per_example.capture import ExampleCapture
from cdgrab.per_example.plan import matrices_of
from cdgrab.per_example.row_builders import RowBuilder, SketchedRows, WholeRows
from cdgrab.per_example.sketch import Sketch
from cdgrab.sources import Attachment
from cdgrab.sources.ddp import DdpAttachment
from cdgrab.sources.fsdp import FsdpAttachment, param_groups
from cdgrab.sources.module import ModuleAttachment

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering


SOURCES = ("batch", "per_example", "sketch")


def attach(
    ordering: Ordering,
    model: nn.Module,
    source: str,
    reduction: str,
    length: int,
    hook: Callable[..., Any] | None,
    hook_state: Any,
) -> Attachment:
    """Attach `ordering` to `model`; raises `ValueError` with the reason where that cannot be done."""
    if source == "ghost":
        raise ValueError(
            "source 'ghost' is gone: use 'sketch', which keeps nearly all of its gain at less cost, or 'per_example' "
            "for exact signs from whole rows"
        )
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; choose one of {', '.join(SOURCES)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; say 'mean' or 'sum', as the loss does with the batch")
    if source != "batch":
        if hook is not None:
            raise ValueError(f"hook= is for source 'batch'; with source {source!r} register it with the model itself")
        return _attach_examples(ordering, model, source, reduction, length)
    world, batch = ordering.world, ordering.batch_size
    if ordering._sorter is not None and ordering.unit_size % batch:
        raise ValueError(
            f"unit_size is {ordering.unit_size}, but a backward pass gives one gradient for the whole batch of "
            f"{batch}; use unit_size=None, or single examples: unit_size=1 and attach(model, source='sketch')"
        )
    ordering._expect(None)
    wrapped = isinstance(model, DistributedDataParallel)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if hook is not None and not wrapped:
        raise ValueError(f"hook= is for DistributedDataParallel; {type(model).__name__} has no communication hook")
    if world.size > 1 and not (wrapped or sharded):
        raise ValueError(
            f"{type(model).__name__} is not wrapped, but there are {world.size} ranks; wrap it in "
            "DistributedDataParallel or apply fully_shard first, then attach"
        )
    if isinstance(model, DistributedDataParallel):
        return _attach_ddp(ordering, model, hook, hook_state)
    if sharded and world.size > 1:
        return _attach_fsdp(ordering, model)
    return ModuleAttachment(ordering, model, max(1, ordering.unit_size // batch))


def _attach_examples(ordering: Ordering, model: nn.Module, source: str, reduction: str, length: int) -> Attachment:
    if ordering._sorter is not None and ordering.unit_size != 1:
        raise ValueError(
            f"source {source!r} gives gradients of single examples, but unit_size is {ordering.unit_size}; make the "
            "ordering with unit_size=1"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("with fully_shard no rank has whole layers to look at; use source 'batch'")
    watched = model.module if isinstance(model, DistributedDataParallel) else model
    shapes = {name: p.shape for name, p in watched.named_parameters() if p.requires_grad}
    sketch = Sketch(shapes, matrices_of(watched), length, ordering.seed) if source == "sketch" else None
    if ordering._settings.ranks_meet:
        check_same(
            "the model", {**_fingerprint(watched), "source": source, "length": length}, ordering._connection.group
        )
    ordering._expect(None if sketch is None else Sketched(sketch.length, sketch.watched))
    rows: RowBuilder = WholeRows(shapes) if sketch is None else SketchedRows(sketch)
    return ExampleCapture(ordering, watched, rows, mean=reduction == "mean")


def _attach_ddp(
    ordering: Ordering, model: DistributedDataParallel, hook: Callable[..., Any] | None, hook_state: Any
) -> Attachment:
    if model._comm_hooks:
        raise ValueError(
            "the model has a communication hook already, and DistributedDataParallel takes only one; give that hook to "
            "attach(model, hook=..., hook_state=...) instead of registering it"
        )
    ranks = dist.get_world_size(model.process_group)
    if ranks != ordering.world.size:
        raise ValueError(f"the model is shared by {ranks} ranks, the ordering by {ordering.world.size}")
    check_same("the model", _fingerprint(model.module), model.process_group)
    return DdpAttachment(ordering, model, hook, hook_state)


def _attach_fsdp(ordering: Ordering, model: nn.Module) -> Attachment:
    if ordering._sorter is not None and not isinstance(ordering._sorter, ShardedPairs):
        raise ValueError(
            f"with fully_shard no rank ever has a whole gradient, which order {ordering.order_name!r} with this "
            "exchange needs; use order 'cd-grab' with exchange 'sharded'"
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                if group.mesh_info.mesh.ndim > 1:
                    raise ValueError(
                        f"{name or 'the model'} is sharded over a mesh of several dimensions; only one is known"
                    )
    check_same("the model", _fingerprint(model), ordering._connection.group)
    return FsdpAttachment(ordering, model)


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """What must be the same on all ranks: names, shapes and types of the trainable parameters."""
    layout = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters() if p.requires_grad]
    return {
        "the number of trainable parameters": len(layout),
        "the number of their elements": sum(math.prod(shape) for _, shape, _ in layout),
        "the names, shapes and types of parameters (a digest)": zlib.crc32(str(layout).encode()),
    }

"""What autograd's engine says of the backward pass under way. Most of it is not public: here it is in one place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

# Asked in a backward pass. What hooks hold on to would live as long as the graph, which goes on after the pass if
# somebody keeps the loss, though what it was made for is freed.
graph_is_kept: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
current_pass: Callable[[], int] = torch._C._current_graph_task_id
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """To be called then, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def gets_gradient(parameter: Tensor, node: Any = None) -> bool:
    """Whether the pass under way will leave one there, by this node, if it is at hand."""
    if not parameter.requires_grad:
        return False
    # A node must not be kept: it belongs to the stream it was made on, and the next pass might come on another.
    node = get_gradient_edge(parameter).node if node is None else node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a parameter that `torch.autograd.grad` is asked for
        return False


def register(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """`tensor.register_hook(hook)` without a handle to remove it by, which takes longer to make than all the rest."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        node = tensor.grad_fn
        if node is None:
            tensor.register_hook(hook)
            return
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    hooks[hook] = hook  # those with a handle have numbers


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def aside(device: torch.device) -> AbstractContextManager[None]:
    """Where nothing gets a history and precision is full, however `backward()` was called; mostly that is so anyway."""
    if torch.is_grad_enabled() or _any_autocast():
        return _aside(device)
    return nullcontext()


def within_transform() -> bool:
    """Whether a function of `torch.func` is under way, in which tensors stand for others."""
    return torch._C._functorch.maybe_current_level() is not None

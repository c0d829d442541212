"""Asks autograd's engine about the backward pass under way. Only this module uses its private functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

# To be called in a backward pass. What hooks reference lives as long as the graph. A kept loss keeps the graph alive
# after the pass, even though its saved tensors are freed.
graph_is_kept: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
current_pass: Callable[[], int] = torch._C._current_graph_task_id
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Have `callback` called at the end of the backward pass, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def gets_gradient(parameter: Tensor, node: Any = None) -> bool:
    """Whether the pass under way will leave a gradient in the parameter; `node` is its accumulation node, if known."""
    if not parameter.requires_grad:
        return False
    # The node must not be kept: it belongs to the stream it was made on, and the next pass may use another.
    node = get_gradient_edge(parameter).node if node is None else node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the pass computes this gradient for `torch.autograd.grad`
        return False


def register(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """`tensor.register_hook(hook)` without a handle, whose creation takes longer than all the rest."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        node = tensor.grad_fn
        if node is None:
            tensor.register_hook(hook)
            return
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    hooks[hook] = hook  # hooks with a handle have integer keys


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def aside(device: torch.device) -> AbstractContextManager[None]:
    """A context without gradients and autocast. It is a null context where both are off, as in most backward passes."""
    if torch.is_grad_enabled() or _any_autocast():
        return _aside(device)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered if it is spread over tensor-parallel peers, which must all call this."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def within_transform() -> bool:
    """Whether a transform of `torch.func` is under way, in which tensors are wrappers of others."""
    return torch._C._functorch.maybe_current_level() is not None

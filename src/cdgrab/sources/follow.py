"""A model whose layers are watched, and watched anew where it has changed between two epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cdgrab.per_example.capture import ExampleCapture
from cdgrab.sources.port import Port
from cdgrab.sources.wrappers import is_fully_sharded

log = logging.getLogger("cdgrab")

Layout = list[tuple[str, int, bool]]


class FollowedModel:
    """Attaches once more at the start of an epoch if parameters were frozen or unfrozen, or layers replaced.

    Args:
        port: Knows whether an epoch has begun.
        model: Whose forward passes are watched.
        watch: Attaches to the model as it is, anew or for the first time.
    """

    def __init__(self, port: Port, model: nn.Module, watch: Callable[[bool], ExampleCapture]) -> None:
        self._port, self._model, self._watch = port, model, watch
        self._capture = watch(False)
        self._seen: Layout | None = _layout(model)  # None in a copy, which does nothing
        self._handle = model.register_forward_pre_hook(self._before_forward)

    @property
    def left_out(self) -> dict[str, str]:
        """Why a parameter is not balanced, by its name."""
        return self._capture.coverage.left_out

    def settle(self) -> None:
        self._capture.settle()

    def detach(self) -> None:
        self._handle.remove()
        self._capture.detach()

    def _before_forward(self, *_: Any) -> None:
        if self._seen is None or torch.compiler.is_compiling():
            return
        if self._port.at_start and torch.is_grad_enabled() and _layout(self._model) != self._seen:
            log.info("layers or trained parameters have changed since the last epoch; the model is attached again")
            self._capture.detach()
            self._capture, self._seen = self._watch(True), _layout(self._model)
        self._capture.before_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_a_copy, ()  # hooks are copied and saved with the model, which is watched once


def _layout(model: nn.Module) -> Layout:
    """What is trained, and by which layers."""
    found = [(name, id(module), True) for name, module in model.named_modules()]
    # `fully_shard` puts other tensors in the place of parameters while layers run.
    known = not is_fully_sharded(model)
    return found + [(name, id(p) if known else 0, p.requires_grad) for name, p in model.named_parameters()]


def _of_a_copy() -> FollowedModel:
    """What the hook of a copy of a watched model belongs to."""
    followed = FollowedModel.__new__(FollowedModel)
    followed._seen = None
    return followed

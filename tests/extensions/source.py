"""A source: gradients of single examples in one linear layer, whose input and output gradient say it all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdgrab.sources import Attachment, Port


@dataclass(frozen=True)
class OneLayer:
    """Balances by the weight of the layer of that name alone."""

    name: str

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        port.expect(None)  # whole rows come
        return Watched(port, model.get_submodule(self.name))


class Watched:
    def __init__(self, port: Port, layer: nn.Module) -> None:
        def on_output(_: nn.Module, inputs: Any, output: Tensor) -> None:
            x = inputs[0].detach()
            output.register_hook(lambda grad: port.observe(torch.einsum("nq,np->nqp", grad, x).flatten(1)))

        self._handle = layer.register_forward_hook(on_output)

    def settle(self) -> None:
        """Nothing waits."""

    def detach(self) -> None:
        self._handle.remove()

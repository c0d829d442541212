"""What sketches of a model are made of, layer by layer, and about what they cost."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.per_example.plan import Layer, find_layers, matrices_of
from cdgrab.per_example.sketch import kind_of
from cdgrab.per_example.sketch_maps import TRANSFORM

_MAPS = {
    "paired": "paired: from Fourier features of inputs and output gradients, or of the gradient where that is cheaper.",
    "spread": "spread: from a product of inputs or output gradients with random signs.",
    "folded": "folded: the gradient is formed, and added up with random signs.",
}


class _Part(NamedTuple):
    """A trainable parameter of a layer: how it is sketched, and the work of one example for that."""

    how: str
    work: float


def explain(model: nn.Module, length: int, inputs: tuple[Any, ...] = ()) -> str:
    """A table, one line for every layer; `inputs` for the model tell how many positions there are."""
    layers = find_layers(model)
    matrices = matrices_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exact = sum(p.numel() for p in model.parameters() if p.requires_grad) <= length
    positions = _positions(model, layers, inputs) if inputs else {}
    table = [["layer", "type", "parameters", "positions", "extra", "sketch"]]
    for layer in layers:
        places = positions.get(layer.name, 1)
        trained = [p for p in layer.module.parameters() if p.requires_grad]
        parts = [_part(p.shape, length, places, factored=names[id(p)] in matrices, exact=exact) for p in trained]
        own = sum(3 * places * p.numel() for p in trained)
        again = layer.adapter.runs_again
        extra = sum(part.work for part in parts) / own + again
        how = " and ".join(dict.fromkeys(part.how for part in parts))
        table.append(
            [
                layer.name or "(the model)",
                type(layer.module).__name__,
                f"{layer.numel:,}",
                str(places if inputs else "?"),
                f"{extra:.2f}x",
                f"runs once more; {how}" if again else how,
            ]
        )
    kept = "is no longer than a sketch, and nothing is lost" if exact else f"becomes a sketch of {length:,} numbers"
    used = [text for how, text in _MAPS.items() if any(how in row[-1] for row in table[1:])]
    notes = [
        f"The gradient of an example {kept}.",
        *used,
        "extra: about the time for sketches, over that of the layer's own forward and backward pass.",
    ]
    if not inputs:
        notes.append("Without inputs every layer is taken to have one position: give a batch, explain(model, x).")
    return "\n".join([*_aligned(table), *notes])


def _part(shape: torch.Size, length: int, positions: int, *, factored: bool, exact: bool) -> _Part:
    """Work is told in multiplications of a matrix product, as `Paired.prefers_rows` tells it."""
    formed = (positions if factored else 1) * shape.numel()
    how = kind_of(shape, length) if factored and not exact else "folded"
    if how != "paired":
        return _Part(how, formed if how == "spread" and positions == 1 else formed + shape.numel())
    window, transform = math.prod(shape[2:]), TRANSFORM * length
    by_features = positions * transform * (2 + (window / 3 if window > 1 else 0))
    return _Part(how, min(by_features, formed + shape[0] * window * transform))


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if 2 <= column <= 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _positions(model: nn.Module, layers: list[Layer], inputs: tuple[Any, ...]) -> dict[str, int]:
    """Outputs in time or space for each example, by layer, from one forward pass."""
    found: dict[str, int] = {}
    num = next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))

    def note(layer: Layer, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        output = output[0] if isinstance(output, tuple) else output  # a state beside it
        if isinstance(output, Tensor):
            channels = output.shape[1 if layer.adapter.channels_first else -1]
            found[layer.name] = max(1, output.numel() // (num * channels))

    handles = [layer.module.register_forward_hook(partial(note, layer)) for layer in layers]
    try:
        # Dropout draws; the run that goes on must not notice.
        with torch.no_grad(), torch.random.fork_rng():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found

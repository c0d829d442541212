"""A table of how each layer of a model is sketched, and of its estimated cost."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cdgrab.per_example.coverage import Coverage
from cdgrab.per_example.layers.base import Unseen
from cdgrab.per_example.plan import Layer, ParameterNames, Plan, check_count, make_plan
from cdgrab.per_example.sketch import kind_of
from cdgrab.per_example.sketch_maps import TRANSFORM

_MAPS = {
    "paired": "paired: from Fourier features of inputs and output gradients, or of the gradient where that is cheaper.",
    "spread": "spread: from a product of inputs or output gradients with random signs.",
    "folded": "folded: the gradient is formed, and added up with random signs.",
}


class _Part(NamedTuple):
    """A trainable parameter: how it is sketched, and the work per example."""

    how: str
    work: float


def explain(model: nn.Module, length: int, inputs: tuple[Any, ...] = ()) -> str:
    """A table with one line for every layer, and what is left out.

    Args:
        model: The model.
        length: Of the sketches.
        inputs: For the model: they tell how many positions layers have, and which do not see single examples.
    """
    plan = make_plan(model)
    coverage = Coverage(plan.sizes, plan.left_out, strict=False)
    positions: dict[str, int] = {}
    if inputs:
        positions, unseen = _positions(model, plan.layers, inputs)
        names = ParameterNames(plan.layers, plan.trained)
        for layer, reason in unseen:
            coverage.leave_out(names.of_layer(layer), reason)
    exact = _fits(plan, length)
    lines = [_line(layer, plan, coverage, length, positions, exact) for layer in plan.layers]
    table = [["layer", "type", "parameters", "positions", "extra", "sketch"], *lines]
    kept = "is no longer than a sketch, and nothing is lost" if exact else f"becomes a sketch of {length:,} numbers"
    notes = [
        f"The gradient of an example {kept}.",
        *[text for how, text in _MAPS.items() if any(how in line[-1] for line in lines)],
        "extra: about the time for sketches, over that of the layer's own forward and backward pass.",
        f"{100 * coverage.share:.1f} % of the trained numbers are balanced.",
    ]
    if coverage.left_out:
        notes.append(coverage.reasons())
    if not inputs:
        notes.append("Without inputs every layer is taken to have one position: give a batch, explain(model, x).")
    return "\n".join([*_aligned(table), *notes])


def most_extra(plan: Plan, coverage: Coverage, length: int) -> float:
    """About the most that sketches add to the arithmetic of the watched layers; more positions cost relatively less."""
    exact = _fits(plan, length)
    found = [(_parts(layer, plan, coverage, length, 1, exact), layer.adapter.runs_again) for layer in plan.layers]
    work = sum(sum(part.work for part in parts) + again * own for (parts, own), again in found)
    return work / sum(own for (_, own), _ in found)


def _fits(plan: Plan, length: int) -> bool:
    """Whether whole gradients are no longer than sketches."""
    return sum(shape.numel() for shape in plan.shapes.values()) <= length


def _line(
    layer: Layer, plan: Plan, coverage: Coverage, length: int, positions: dict[str, int], exact: bool
) -> list[str]:
    """The line of one layer."""
    parts, own = _parts(layer, plan, coverage, length, positions.get(layer.name, 1), exact)
    again = layer.adapter.runs_again
    extra = sum(part.work for part in parts) / own + again
    how = " and ".join(dict.fromkeys(part.how for part in parts))
    return [
        layer.name or "(the model)",
        type(layer.module).__name__,
        f"{layer.numel:,}",
        str(positions.get(layer.name, "?")),
        f"{extra:.2f}x" if parts else "",
        f"runs once more; {how}" if again and parts else how or "left out",
    ]


def _parts(
    layer: Layer, plan: Plan, coverage: Coverage, length: int, positions: int, exact: bool
) -> tuple[list[_Part], float]:
    """The balanced parameters of a layer, and the work per example of its own forward and backward pass."""
    names = {id(p): name for name, p in plan.trained.items()}
    trained = [p for p in layer.module.parameters() if p.requires_grad]
    parts = [
        _part(p.shape, length, positions, factored=names[id(p)] in plan.matrices, exact=exact)
        for p in trained
        if names[id(p)] not in coverage.left_out
    ]
    return parts, float(sum(3 * positions * p.numel() for p in trained))


def _part(shape: torch.Size, length: int, positions: int, *, factored: bool, exact: bool) -> _Part:
    """The map and the work of a parameter. Work is counted in multiplications, as in `Paired.prefers_rows`."""
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


def _positions(
    model: nn.Module, layers: list[Layer], inputs: tuple[Any, ...]
) -> tuple[dict[str, int], list[tuple[Layer, str]]]:
    """Outputs in time or space for each example, by layer, and layers that do not see examples, from one run."""
    found: dict[str, int] = {}
    unseen: list[tuple[Layer, str]] = []
    num = next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))

    def note(layer: Layer, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        output = output[0] if isinstance(output, tuple) else output  # a state beside it
        if isinstance(output, Tensor):
            channels = output.shape[1 if layer.adapter.channels_first else -1]
            found[layer.name] = max(1, output.numel() // (num * channels))
            try:
                check_count(layer, [output], num)
            except Unseen as reason:
                unseen.append((layer, str(reason)))

    handles = [layer.module.register_forward_hook(partial(note, layer)) for layer in layers]
    try:
        # Dropout draws numbers; the training run must not be affected.
        with torch.no_grad(), torch.random.fork_rng():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found, unseen

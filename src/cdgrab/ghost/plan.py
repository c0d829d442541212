"""Which layers of a model there are, what each of them will take, and which cannot be served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdgrab.balance.compiled import available
from cdgrab.ghost import compiled
from cdgrab.ghost.attention import attends
from cdgrab.ghost.layers import MIXES_EXAMPLES, WHOLE, handler_of
from cdgrab.ghost.records import FEW_ROWS, MOST_NUMBERS_OF_ROWS, mostly_rows, prefers_factors
from cdgrab.ghost.recurrent import is_lengthened, opens


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters of its own, and how their gradients are found example by example."""

    name: str
    module: nn.Module
    known: bool  # from its inputs and output gradients; otherwise it is differentiated once more
    numel: int

    def size(self) -> tuple[int, int] | None:
        """Outputs and inputs of a layer that is a matrix."""
        weight = self.module.weight if isinstance(self.module, (nn.Linear, nn.Conv1d, nn.Conv2d)) else None
        return None if weight is None else (weight.shape[0], weight[0].numel())


@dataclass(frozen=True)
class Cost:
    """What a layer takes per step."""

    how: str
    kept: int  # numbers per example, from one step to the next
    extra: float  # multiplications, over those of its forward and backward pass


def cost(layer: Layer, positions: int, batch: int, *, by_rows: bool) -> Cost:
    """With `positions` in time or space, and `batch` examples, of which two steps make the pairs.

    `by_rows` says how the pairs of the model are balanced (`balances_by_rows`).
    """
    size = layer.size()
    if opens(layer.module) or attends(layer.module):
        return _cost_of_parts(layer.module, positions, batch, by_rows)
    if not layer.known:
        return Cost("differentiated once more for every example", layer.numel, 1.0)
    if isinstance(layer.module, nn.Embedding):
        q = layer.module.embedding_dim
        return Cost("tokens and output gradients", positions * (q + 1), float("nan"))
    if size is None:
        return Cost("rows of this layer", layer.numel, float("nan"))
    return _matrix_cost(*size, positions, batch, by_rows)


def _matrix_cost(q: int, p: int, positions: int, batch: int, by_rows: bool) -> Cost:
    plain = 6 * batch * positions * p * q
    # Rows are formed, multiplied with each other and with the running sum, and added to it.
    together = FEW_ROWS if by_rows else batch
    if _as_rows(q, p, positions):
        return Cost("rows of this layer", p * q, (2 * positions + together + 2) * batch * p * q / plain)
    kept = positions * (p + q)
    if by_rows:
        how = "factors; rows of a few examples while pairs are balanced"
        return Cost(how, kept, (2 * positions + together + 2) * batch * p * q / plain)
    if prefers_factors(batch, 2 * positions, p, q):
        return Cost("factors", kept, (4 * (batch * positions) ** 2 * (p + q) + 4 * batch * positions * p * q) / plain)
    how = "factors; rows of this layer while pairs are balanced"
    return Cost(how, kept, (4 * positions + together + 1) * batch * p * q / plain)


def _as_rows(q: int, p: int, positions: int) -> bool:
    """Whether rows are smaller than factors."""
    return p * q <= positions * (p + q)


def _matrices(layer: Layer) -> list[tuple[int, int]]:
    """Outputs and inputs of the trained matrices of a layer."""
    size = layer.size()
    if opens(layer.module) or attends(layer.module):
        return [(p.shape[0], p.shape[1]) for p in layer.module.parameters() if p.ndim == 2 and p.requires_grad]
    return [] if size is None or not layer.known else [size]


def balances_by_rows(layers: list[Layer], positions: dict[str, int], batch: int) -> bool:
    """Whether rows of a few examples are formed while pairs are balanced, as `pairs.work_of` decides."""
    by_factors = 0
    for layer in layers:
        places = positions.get(layer.name, 1)
        for q, p in _matrices(layer):
            if not _as_rows(q, p, places) and prefers_factors(batch, 2 * places, p, q):
                by_factors += p * q
    total = sum(layer.numel for layer in layers)
    return mostly_rows(by_factors, total) and FEW_ROWS * total <= MOST_NUMBERS_OF_ROWS


def _cost_of_parts(module: nn.Module, positions: int, batch: int, by_rows: bool) -> Cost:
    """Of a module with several matrices, which runs once more for the gradients of their outputs."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    sizes = [parameter.shape for parameter in matrices]
    trained = [parameter.shape for parameter in matrices if parameter.requires_grad]
    parts = [(q * p, _matrix_cost(q, p, positions, batch, by_rows)) for q, p in trained]
    again = sum(4 * q * p for q, p in sizes)  # forward, and back to the inputs
    plain = again + sum(2 * numel for numel, _ in parts)
    if opens(module) and is_lengthened(module, matrices[0]):
        # There are as many inputs more as it has gates, and two weights for each set of gates.
        again += sum(2 * q * q for q, _ in sizes)
    of_weights = sum(6 * numel * found.extra for numel, found in parts)
    kept = sum(found.kept for _, found in parts)
    return Cost("run once more; then like linear layers", kept, (again + of_weights) / plain)


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers of a model; raises `ValueError` for what cannot be served, with the remedy."""
    if hasattr(model, "_orig_mod"):  # torch.compile's; asking for its class would import all of the compiler
        raise ValueError(
            "the model is compiled, which leaves no layers to look at; attach the model itself, and compile its parts "
            "or not at all"
        )
    layers: list[Layer] = []
    inside: list[str] = []  # prefixes of modules that are looked at as a whole
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        as_a_whole = isinstance(module, WHOLE)
        owned = [p for p in module.parameters(recurse=as_a_whole) if p.requires_grad]
        if isinstance(module, MIXES_EXAMPLES):
            check_mixing(name, module)
        if not owned:
            continue
        known = handler_of(module) is not None
        strange = {key for key, p in module.named_parameters(recurse=False) if p.requires_grad} - {"weight", "bias"}
        if known and strange:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) makes its weight from {', '.join(sorted(strange))}, as with "
                "weight normalisation, which is not known; remove it, or freeze the layer"
            )
        if not known and not as_a_whole and any(True for _ in module.children()):
            names = ", ".join(repr(key) for key, p in module.named_parameters(recurse=False) if p.requires_grad)
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has layers inside and uses the parameter {names} "
                "itself, where it cannot be watched; move it into a layer of its own (an Embedding, say), or freeze it"
            )
        if as_a_whole:
            check_whole(name, module)
            inside.append(f"{name}." if name else "")
        layers.append(Layer(name, module, known, sum(p.numel() for p in owned)))
    if not layers:
        raise ValueError("the model has no trainable parameter; there is no gradient to order by")
    return layers


def check_mixing(name: str, module: nn.Module) -> None:
    """Refuse a layer that takes statistics of the batch."""
    if module.training:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so that none of them has a "
            "gradient of its own; use GroupNorm, or put the layer into eval mode"
        )


def counted_twice() -> ValueError:
    """For a graph that was kept, or passes that nobody asked for."""
    return ValueError(
        "there was a second backward pass after one forward pass, and a batch is counted for each; add the losses up "
        "and call backward() once; with activation checkpointing use use_reentrant=False"
    )


def spent(layer: Layer) -> RuntimeError:
    """For a graph that has been used up, which PyTorch itself would say a little later."""
    return RuntimeError(
        f"a backward pass comes by layer {layer.name!r} ({type(layer.module).__name__}) for the second time, and the "
        "first was not called with retain_graph=True; add the losses up and call backward() once"
    )


def changed_in_place(layer: Layer | str) -> ValueError:
    """For tensors that are no longer what the layer saw, or the layer of the parameter with this name."""
    who = (
        f"the layer of {layer!r}" if isinstance(layer, str) else f"layer {layer.name!r} ({type(layer.module).__name__})"
    )
    return ValueError(
        f"what {who} took or gave was changed in place, so that its "
        "gradients cannot be told apart; use an operation that is not in place"
    )


def check_count(layer: Layer, grads: Sequence[Tensor | None], num: int) -> None:
    """Refuse outputs, with these gradients, that have not one entry for each of `num` examples where they should."""
    place, shape = next((place, grad.shape) for place, grad in enumerate(grads) if grad is not None)
    length = shape[1] if place > 0 and opens(layer.module) else shape[0]  # states have the layers first
    flattened = len(shape) == 2 and length % num == 0 and isinstance(layer.module, nn.Linear)
    if length != num and not flattened:
        raise ValueError(
            f"layer {layer.name!r} ({type(layer.module).__name__}) has outputs of shape {tuple(shape)}, but the batch "
            f"has {num} examples; examples must come first in every layer (batch_first=True; positions of an Embedding "
            "expanded to one row for each example)"
        )


class Miss(NamedTuple):
    """By how much the examples' gradients miss that of the batch, and how long it is."""

    error: float
    length: float

    @classmethod
    def of(cls, found: Tensor, grad: Tensor) -> Miss:
        return cls(float((found - grad).norm()), float(grad.norm()))


def check_misses(misses: Mapping[str, Miss]) -> None:
    """Whether the examples' gradients add up to the batch's: if not, a parameter is used where nobody watches."""
    # Some gradients are zero but for rounding (the bias of an attention's keys), so the largest sets the scale.
    noise = 1e-3 * max(miss.length for miss in misses.values())
    for name, (error, length) in misses.items():
        if error > 0.1 * length + noise:
            raise ValueError(
                f"the gradients of single examples do not add up to that of the batch for the parameter {name!r} "
                f"(they miss it by {error:.3g}, its length is {length:.3g}): it is used somewhere "
                "outside of its layer, where it cannot be watched; use the layer itself, or source='batch'"
            )


def written_down(model: nn.Module, batch: int) -> bool:
    """Whether rows of a batch are few enough to be recorded, on a GPU: small models spend their time on launches."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = batch * sum(parameter.numel() for parameter in trainable)
    return numbers <= _FEW_NUMBERS and any(parameter.is_cuda for parameter in trainable)


def explain(model: nn.Module, batch: int, inputs: tuple[Any, ...] = ()) -> str:
    """The plan as a table, one line for every layer; `inputs` for the model tell how many positions there are."""
    layers = find_layers(model)
    positions = _positions(model, layers, inputs) if inputs else {}
    table = [["layer", "type", "parameters", "positions", "kept", "extra", "gradients of single examples"]]
    by_rows = balances_by_rows(layers, positions, batch)
    for layer in layers:
        found = cost(layer, positions.get(layer.name, 1), batch, by_rows=by_rows)
        table.append(
            [
                layer.name or "(the model)",
                type(layer.module).__name__,
                f"{layer.numel:,}",
                str(positions.get(layer.name, "?" if not inputs else 1)),
                f"{found.kept:,}",
                "little" if math.isnan(found.extra) else f"{found.extra:.2f}x",
                found.how,
            ]
        )
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    aligned = [
        "  ".join(
            cell.rjust(width) if 2 <= column <= 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    notes = [
        f"kept: numbers per example until the pair is complete. extra: multiplications over those of the layer's own "
        f"step, with {batch} examples in a batch."
    ]
    if any(_gives_its_gradient(layer, positions.get(layer.name, 1)) for layer in layers):
        notes.append(
            "On a CPU the rows of a convolution take the place of its weights' gradient, which is their sum: the layer "
            "does not find it itself, which 'extra' does not count."
        )
    if _one_by_one(layers, positions, batch):
        notes.append(
            "These layers are small: on a CPU, with the default rule, pairs are balanced one by one, which takes less "
            "than 'extra' says."
        )
    if not inputs:
        notes.append("Without inputs every layer is taken to have one position: give a batch, explain(model, x).")
    return "\n".join([*aligned, *notes])


def _gives_its_gradient(layer: Layer, positions: int) -> bool:
    """Whether rows are written as soon as the layer is reached by the backward pass, which can take their sum then."""
    size = layer.size()
    return (
        layer.known
        and isinstance(layer.module, (nn.Conv1d, nn.Conv2d))
        and size is not None
        and _as_rows(*size, positions)
    )


def _one_by_one(layers: list[Layer], positions: dict[str, int], batch: int) -> bool:
    """Whether compiled code balances pairs of these layers without a table; with as many pairs as examples."""
    saved = 0.0
    for layer in layers:
        size, places = layer.size(), positions.get(layer.name, 1)
        if not layer.known or isinstance(layer.module, nn.Embedding):
            return False
        as_rows = size is None or _as_rows(*size, places)
        if not as_rows and places > 1:
            return False
        for parameter in layer.module.parameters():
            if parameter.requires_grad and parameter.ndim > 1 and size is not None and not as_rows:
                saved += compiled.saved_by_matrix(batch, size[1], size[0])
            elif parameter.requires_grad:
                saved += compiled.saved_by_rows(batch, parameter.numel())
    small = sum(layer.numel for layer in layers) <= compiled.MOST_NUMBERS
    return small and saved > 0 and available()


def _positions(model: nn.Module, layers: list[Layer], inputs: tuple[Any, ...]) -> dict[str, int]:
    """Outputs in time or space for each example, by layer, from one forward pass."""
    found: dict[str, int] = {}
    num = len(inputs[0])

    def note(name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output  # a state beside it
        if isinstance(output, torch.Tensor):
            channels = output.shape[1] if isinstance(model.get_submodule(name), _CHANNELS_FIRST) else output.shape[-1]
            found[name] = max(1, output.numel() // (num * channels))

    handles = [
        layer.module.register_forward_hook(lambda module, args, output, name=layer.name: note(name, output))  # noqa: ARG005
        for layer in layers
    ]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


_FEW_NUMBERS = 1 << 24
_CHANNELS_FIRST = (nn.Conv1d, nn.Conv2d, nn.GroupNorm)


def check_whole(name: str, module: nn.Module) -> None:
    """Refuse modules with dropout inside, and those that want examples along another dimension."""
    if not isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return
    if not module.batch_first:
        raise ValueError(f"layer {name!r} ({type(module).__name__}) must be made with batch_first=True")
    if module.dropout and module.training:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) has dropout inside, which cannot be repeated when it is "
            "differentiated once more; make it with dropout=0 and put a Dropout layer beside it"
        )

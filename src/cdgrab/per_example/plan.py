"""Which layers of a model are watched, which cannot be, and what is refused with the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from cdgrab.per_example.layers import MIXES_EXAMPLES, WHOLE, handler_of
from cdgrab.per_example.layers.attention import attends
from cdgrab.per_example.layers.recurrent import opens


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters of its own.

    Attributes:
        known: Whether gradients of examples follow from its input and output gradient; otherwise it runs once more.
        numel: Of its trainable parameters.
    """

    name: str
    module: nn.Module
    known: bool
    numel: int

    @property
    def has_factors(self) -> bool:
        """Whether gradients of its matrices come as factors, not as rows."""
        if isinstance(self.module, (nn.Conv1d, nn.Conv2d)):
            return self.known and self.module.groups == 1
        factored = self.known and isinstance(self.module, (nn.Linear, nn.Embedding))
        return factored or opens(self.module) or attends(self.module)


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


def matrices_of(model: nn.Module) -> set[str]:
    """Names of the trainable parameters whose gradients come as factors of a matrix, not as rows."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]
        for layer in find_layers(model)
        if layer.has_factors
        for parameter in layer.module.parameters()
        if parameter.requires_grad and parameter.ndim > 1
    }


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

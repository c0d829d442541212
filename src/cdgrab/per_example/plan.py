"""Which layers of a model are watched, and which of its parameters are left out because none of them shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdgrab.per_example.layers import adapter_of
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors, Unseen


@dataclass(frozen=True)
class Layer:
    """A module with `numel` trainable parameters of its own. `str` gives its title in errors."""

    name: str
    module: nn.Module
    adapter: LayerAdapter
    numel: int

    def __str__(self) -> str:
        return described(self.name, self.module)


@dataclass(frozen=True)
class Plan:
    """What is watched of a model.

    Attributes:
        layers: The layers to watch.
        trained: All trainable parameters, by name.
        left_out: Why a parameter cannot be balanced, by name, where that is known before training begins.
        is_sharded: Whether `fully_shard` has been applied, which puts other tensors in the place of parameters while
            layers run.
    """

    layers: list[Layer]
    trained: dict[str, nn.Parameter]
    left_out: dict[str, str]
    is_sharded: bool

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that are balanced, in the order of the model."""
        return {name: p.shape for name, p in self.trained.items() if name not in self.left_out}

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of each trained parameter."""
        return {name: p.numel() for name, p in self.trained.items()}

    @property
    def matrices(self) -> set[str]:
        """Names of the parameters whose gradients come as factors of a matrix, not as rows."""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        keys = [(layer.module, key) for layer in self.layers for key in layer.adapter.matrices(layer.module)]
        found = {names.get(id(module.get_parameter(key))) for module, key in keys}
        return {name for name in found if name is not None}


def make_plan(model: nn.Module, *, is_sharded: bool = False) -> Plan:
    """The layers to watch, and what is left out. Nothing is raised, even if nothing can be watched."""
    layers: list[Layer] = []
    reasons: dict[int, str] = {}  # by parameter
    inside: list[str] = []  # prefixes of modules that are watched, or left out, as a whole
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        adapter = adapter_of(module)
        is_whole, reason = _is_compiled(module), None
        if is_whole:
            reason = f"{described(name, module)} is compiled, which leaves no layers to watch"
        is_whole = is_whole or adapter.is_whole
        owned = [p for p in module.parameters(recurse=is_whole) if p.requires_grad]
        if is_whole:
            inside.append(f"{name}." if name else "")
        if not owned:
            continue
        if is_sharded and adapter.runs_again:
            reason = f"{described(name, module)} would run once more when fully_shard has taken its weights away"
        reason = reason or _reason_against(name, module, adapter)
        if reason is None:
            layers.append(Layer(name, module, adapter, sum(p.numel() for p in owned)))
        else:
            reasons |= {id(parameter): reason for parameter in owned}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left_out = {name: reasons[id(p)] for name, p in trained.items() if id(p) in reasons}
    return Plan(layers, trained, left_out, is_sharded)


def described(name: str, module: nn.Module) -> str:
    """What messages call a module."""
    return f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _is_compiled(module: nn.Module) -> bool:
    # By attribute: asking for the class would import the compiler.
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _reason_against(name: str, module: nn.Module, adapter: LayerAdapter) -> str | None:
    """Why the parameters of a module cannot be watched; None if they can."""
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return f"{described(name, module)} is no layer: a module around it uses its parameters"
    has_layers_inside = any(True for child in module.children() for _ in child.parameters())
    if adapter.runs_again and not adapter.is_whole and has_layers_inside:
        return f"{described(name, module)} has layers inside and uses these itself, where they cannot be watched"
    try:
        adapter.check(name, module)
    except ValueError as error:
        return str(error)
    return None


class ParameterNames:
    """Names of the layers' parameters in the model; the first one for a parameter with several."""

    def __init__(self, layers: list[Layer], parameters: Mapping[str, nn.Parameter]) -> None:
        first = {id(parameter): name for name, parameter in parameters.items()}
        self._names = {
            (layer.name, key): first[id(parameter)]
            for layer in layers
            for key, parameter in layer.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        again = {layer.name for layer in layers if layer.adapter.runs_again}
        # The factors of these come only at the end of the pass.
        self.late = {name for (layer_name, _), name in self._names.items() if layer_name in again}

    def of(self, layer: Layer, key: str) -> str | None:
        """The name in the model of a layer's parameter; None if it was frozen when the layers were found."""
        return self._names.get((layer.name, key))

    def of_layer(self, layer: Layer) -> list[str]:
        """The names in the model of all parameters of a layer."""
        return [name for (layer_name, _), name in self._names.items() if layer_name == layer.name]


def check_count(layer: Layer, grads: Sequence[Tensor | None], num: int) -> None:
    """Raise `ValueError` if outputs do not have one entry per example, given their gradients."""
    output, shape = next((output, grad.shape) for output, grad in enumerate(grads) if grad is not None)
    length = shape[layer.adapter.example_dim(output)]
    flattened = layer.adapter.takes_flattened and len(shape) == 2 and length % num == 0
    if length != num and not flattened:
        raise Unseen(
            f"{layer} has outputs of shape {tuple(shape)}, and the ordering expects {num} examples now; examples must "
            "come first in every layer (batch_first=True; positions of an Embedding expanded to one row for each "
            "example), and the loader must have the ordering's sampler and batch size"
        )


def check_factors(layer: Layer, found: LayerFactors, num: int) -> None:
    """Raise `ValueError` if an adapter's factors do not fit the parameters of its layer."""
    sizes = {key: parameter.numel() for key, parameter in layer.module.named_parameters(remove_duplicate=False)}
    if not isinstance(found, dict) or not found.keys() <= sizes.keys():
        given = f"the keys {', '.join(map(repr, found))}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ValueError(
            f"the adapter of {layer} returned {given}; expected a dict of factors by the names of the layer's "
            f"parameters ({', '.join(sizes)})"
        )
    for key, factors in found.items():
        shape = (len(factors), factors.total().numel())
        if shape != (num, sizes[key]):
            raise ValueError(
                f"the adapter of {layer} returned factors of {key!r} for {shape[0]} examples x {shape[1]} numbers; "
                f"expected {num} x {sizes[key]}"
            )

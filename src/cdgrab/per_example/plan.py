"""Which layers of a model are watched, and which models are refused, with the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cdgrab.per_example.layers import adapter_of
from cdgrab.per_example.layers.base import LayerAdapter, LayerFactors
from cdgrab.per_example.layers.norms import check_mixing, mixing_layers


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters of its own; `numel` counts these. As text it is what errors call it."""

    name: str
    module: nn.Module
    adapter: LayerAdapter
    numel: int

    def __str__(self) -> str:
        return f"layer {self.name!r} ({type(self.module).__name__})"


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers of a model; raises `ValueError` for what cannot be served, with the remedy."""
    if hasattr(model, "_orig_mod"):  # torch.compile's; asking for its class would import all of the compiler
        raise ValueError(
            "the model is compiled, which leaves no layers to watch; attach the model itself, and compile its parts "
            "or not at all"
        )
    for name, module in mixing_layers(model):
        check_mixing(name, module)
    layers: list[Layer] = []
    inside: list[str] = []  # prefixes of modules that are watched as a whole
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        adapter = adapter_of(module)
        owned = [p for p in module.parameters(recurse=adapter.is_whole) if p.requires_grad]
        if not owned:
            continue
        if adapter.runs_again and not adapter.is_whole and any(True for _ in module.children()):
            names = ", ".join(repr(key) for key, p in module.named_parameters(recurse=False) if p.requires_grad)
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has layers inside and uses the parameter {names} "
                "itself, where it cannot be watched; move it into a layer of its own (an Embedding, say), or freeze it"
            )
        adapter.check(name, module)
        if adapter.is_whole:
            inside.append(f"{name}." if name else "")
        layers.append(Layer(name, module, adapter, sum(p.numel() for p in owned)))
    if not layers:
        raise ValueError("the model has no trainable parameter; there is no gradient to order by")
    return layers


def matrices_of(model: nn.Module) -> set[str]:
    """Names of the trainable parameters whose gradients come as factors of a matrix, not as rows."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = [(layer.module, layer.adapter.matrices(layer.module)) for layer in find_layers(model)]
    matrices = [module.get_parameter(key) for module, keys in modules for key in keys]
    return {names[id(parameter)] for parameter in matrices if parameter.requires_grad}


class ParameterNames:
    """What the parameters of layers are called in the model. One with several names goes by the first of them."""

    def __init__(self, layers: list[Layer], parameters: Mapping[str, nn.Parameter]) -> None:
        first = {id(parameter): name for name, parameter in parameters.items()}
        self._names = {
            (layer.name, key): first[id(parameter)]
            for layer in layers
            for key, parameter in layer.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        again = {layer.name for layer in layers if layer.adapter.runs_again}
        # Those whose gradients are found at the end of the pass.
        self.late = {name for (layer_name, _), name in self._names.items() if layer_name in again}

    def of(self, layer: Layer, key: str) -> str:
        """The name in the model of a layer's parameter."""
        name = self._names.get((layer.name, key))
        if name is None:
            raise ValueError(
                f"{key!r} of {layer} was frozen when the model was attached and is trained now; call "
                "detach(), and attach the model again"
            )
        return name


def check_count(layer: Layer, grads: Sequence[Tensor | None], num: int) -> None:
    """Refuse outputs, with these gradients, that have not one entry for each of `num` examples where they should."""
    output, shape = next((output, grad.shape) for output, grad in enumerate(grads) if grad is not None)
    length = shape[layer.adapter.example_dim(output)]
    flattened = layer.adapter.takes_flattened and len(shape) == 2 and length % num == 0
    if length != num and not flattened:
        raise ValueError(
            f"{layer} has outputs of shape {tuple(shape)}, but the batch has {num} examples; examples must come first "
            "in every layer (batch_first=True; positions of an Embedding expanded to one row for each example)"
        )


def check_factors(layer: Layer, found: LayerFactors, num: int) -> None:
    """Refuse what an adapter gives if it does not fit the parameters of its layer."""
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

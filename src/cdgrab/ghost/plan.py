"""Which layers of a model there are, what each of them will take, and which cannot be served."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cdgrab.ghost.layers import MIXES_EXAMPLES, WHOLE, handler_of


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters of its own, and how their gradients are found example by example."""

    name: str
    module: nn.Module
    known: bool  # from its inputs and output gradients; otherwise it is differentiated once more
    numel: int

    @property
    def how(self) -> str:
        if not self.known:
            return "differentiated once more for every example; the rows are kept until the pair is complete"
        if isinstance(self.module, nn.Linear):
            return "factors, or rows of this layer where that is cheaper"
        if isinstance(self.module, nn.Embedding):
            return "tokens and output gradients"
        return "rows of this layer"


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
        if isinstance(module, MIXES_EXAMPLES) and module.training and owned:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so that none of them has a "
                "gradient of its own; use GroupNorm, or put the layer into eval mode"
            )
        if not owned:
            continue
        known = handler_of(module) is not None
        if not known and not as_a_whole and any(True for _ in module.children()):
            names = ", ".join(repr(key) for key, p in module.named_parameters(recurse=False) if p.requires_grad)
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has layers inside and uses the parameter {names} "
                "itself, where it cannot be watched; move it into a layer of its own (an Embedding, say), or freeze it"
            )
        if as_a_whole and isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            _check_whole(name, module)
            inside.append(f"{name}." if name else "")
        layers.append(Layer(name, module, known, sum(p.numel() for p in owned)))
    if not layers:
        raise ValueError("the model has no trainable parameter; there is no gradient to order by")
    return layers


def explain(model: nn.Module) -> str:
    """The plan as a table, one line for every layer."""
    layers = find_layers(model)
    width = max(len(layer.name) for layer in layers)
    lines = [
        f"{layer.name:{width}}  {type(layer.module).__name__:22} {layer.numel:>12,}  {layer.how}" for layer in layers
    ]
    return "\n".join([f"{'layer':{width}}  {'type':22} {'parameters':>12}  gradients of single examples", *lines])


def _check_whole(name: str, module: nn.MultiheadAttention | nn.RNNBase) -> None:
    if not module.batch_first:
        raise ValueError(f"layer {name!r} ({type(module).__name__}) must be made with batch_first=True")
    if module.dropout and module.training:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) has dropout inside, which cannot be repeated when it is "
            "differentiated once more; make it with dropout=0 and put a Dropout layer beside it"
        )

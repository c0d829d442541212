"""LSTM, GRU and RNN: the factors of all weights, from the gradients of the gates.

Fused kernels do not return the gradients of the gates at every step in time. There are two ways to get them. A wider
layer has extra inputs, zeros that an identity matrix adds to the gates: the outputs stay the same, and the gradients of
the zeros are those of the gates. Or the layer runs step by step. The first way is for GPUs, where single steps would be
nothing but launches, and for narrow layers. Otherwise, on a CPU, the second takes a half or a third of the time.

Shapes: `N` examples, `T` steps in time, `p` inputs, `H` hidden numbers, `G` numbers of all gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from cdgrab.factors import Matrix, Rows
from cdgrab.per_example.layers.base import LayerFactors, check_repeatable, weights_of, widened
from cdgrab.per_example.layers.unknown import OneByOne

_NARROW = 64  # with fewer hidden numbers, calls take most of a CPU's time
State = tuple[Tensor, ...]


class OneByOneRecurrent(OneByOne):
    """Serves recurrent layers with projections or with weights computed from others, and subclasses."""

    is_whole = True

    def check(self, name: str, module: Any) -> None:
        check_repeatable(name, module)

    def factors_again(self, module: Any, args: Any, kwargs: Any, grads: list[Tensor | None], num: int) -> LayerFactors:
        if len(args) > 1 or kwargs:
            raise ValueError(
                f"{type(module).__name__} with projections, or with weights computed from others, is called with a "
                "state, which does not have examples first; call it without a state, or freeze it"
            )
        return super().factors_again(module, args, kwargs, grads, num)

    def args_of_one(self, module: Any, args: Any) -> Any:
        """The arguments with a state of zeros, derived from `x` so that `vmap` has it for every example."""
        [x] = args
        layers, zero = module.num_layers * (1 + module.bidirectional), 0 * x.flatten()[0]
        h = zero + x.new_zeros(layers, len(x), getattr(module, "proj_size", 0) or module.hidden_size)
        c = zero + x.new_zeros(layers, len(x), module.hidden_size)
        return x, (h, c) if isinstance(module, nn.LSTM) else h


class RecurrentAdapter(OneByOneRecurrent):
    """Serves `LSTM`, `GRU` and `RNN`, with a state or without, for all examples together.

    On a GPU factors are as exact as cuDNN's own gradients, whose precision `torch.backends` sets.
    """

    fallback = OneByOneRecurrent()

    def takes(self, module: Any) -> bool:
        known = isinstance(module, (nn.LSTM, nn.GRU, nn.RNN)) and not module.proj_size
        return known and set(module._flat_weights_names) == module._parameters.keys()

    def matrices(self, module: Any) -> list[str]:
        return weights_of(module)

    def example_dim(self, output: int) -> int:
        return 1 if output > 0 else 0  # states have the layers first

    def check_call(self, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        if not isinstance(input, Tensor) or input.ndim != 3:
            raise ValueError("a recurrent layer was called with a packed or single sequence; pass a padded batch")

    def factors_again(self, module: Any, args: Any, kwargs: Any, grads: list[Tensor | None], num: int) -> LayerFactors:  # noqa: ARG002
        args, kwargs = widened((args, kwargs))
        with torch.enable_grad():
            outputs, taps = run(module, *args, **kwargs)
            known = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
            gates = torch.autograd.grad(
                [output for output, _ in known],
                [tap.gates_NTG for tap in taps],
                [grad for _, grad in known],
                allow_unused=True,
            )
        found: LayerFactors = {}
        for tap, b_NTG in zip(taps, gates, strict=True):
            if b_NTG is not None:
                found |= _factors_of_gates(module, tap, b_NTG)
        return found


class Tap(NamedTuple):
    """The inputs of one direction of one layer, and the tensor whose gradients are those of its gates."""

    suffix: str  # of its parameters' names
    x_NTp: Tensor
    before_NTH: Tensor  # hidden numbers before each step
    gates_NTG: Tensor


def run(module: Any, input: Tensor, hx: Any = None) -> tuple[list[Tensor], list[Tap]]:
    """The outputs and last states of the module, and a tap for each direction of each layer."""
    given = tuple(tree_leaves(hx)) if hx is not None else ()
    taps: list[Tap] = []
    left: list[State] = []
    run_layer = _run_widened if input.is_cuda or module.hidden_size < _NARROW else _run_step_by_step
    for layer in range(module.num_layers):
        sides = []
        for end in ("", "_reverse")[: 1 + module.bidirectional]:
            x_NTp = input.flip(1) if end else input
            first = tuple(part[len(taps) : len(taps) + 1] for part in given)
            hidden_NTH, last, gates_NTG = run_layer(module, f"_l{layer}{end}", x_NTp, first)
            begin_N1H = first[0].transpose(0, 1) if first else torch.zeros_like(hidden_NTH[:, :1])
            before_NTH = torch.cat([begin_N1H.detach(), hidden_NTH[:, :-1].detach()], 1)
            taps.append(Tap(f"_l{layer}{end}", x_NTp.detach(), before_NTH, gates_NTG))
            sides.append(hidden_NTH.flip(1) if end else hidden_NTH)
            left.append(last)
        input = torch.cat(sides, 2) if len(sides) > 1 else sides[0]
    return [input, *(torch.cat(parts) for parts in zip(*left, strict=True))], taps


def _run_widened(module: Any, suffix: str, x_NTp: Tensor, first: State) -> tuple[Tensor, State, Tensor]:
    """The hidden numbers, the last state, and the zeros that were added to the gates.

    It runs a wider copy of the module, because cuDNN wants the weights in one block of memory, as modules have them.
    """
    inputs, gates = x_NTp.shape[2], len(module.get_parameter("weight_ih" + suffix))
    options: dict[str, Any] = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    # On the device "meta" first, so that no random number is drawn.
    options |= {"bias": module.bias, "batch_first": True, "dtype": x_NTp.dtype, "device": "meta"}
    wider = type(module)(inputs + gates, module.hidden_size, **options).to_empty(device=x_NTp.device)
    with torch.no_grad():
        for name, place in wider.requires_grad_(False).named_parameters():
            value = module.get_parameter(name.removesuffix("_l0") + suffix)
            place[..., : value.shape[-1]] = value
        wider.weight_ih_l0[:, inputs:] = torch.eye(gates, dtype=x_NTp.dtype, device=x_NTp.device)
    zeros_NTG = x_NTp.new_zeros(*x_NTp.shape[:2], gates).requires_grad_()
    state = None if not first else first if len(first) > 1 else first[0]
    hidden_NTH, last = wider(torch.cat([x_NTp, zeros_NTG], 2), state)
    return hidden_NTH, tuple(tree_leaves(last)), zeros_NTG


def _run_step_by_step(module: Any, suffix: str, x_NTp: Tensor, first: State) -> tuple[Tensor, State, Tensor]:
    """The hidden numbers, the last state, and the inputs' share of the gates."""
    w_ih, w_hh, b_ih, b_hh = (
        _weight(module, name + suffix, x_NTp.dtype) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    assert w_ih is not None
    assert w_hh is not None
    gates_NTG = linear(x_NTp, w_ih, b_ih)
    if not gates_NTG.requires_grad:
        gates_NTG.requires_grad_()
    zeros_NH = gates_NTG.new_zeros(len(x_NTp), module.hidden_size)
    state = tuple(part[0] for part in first) if first else (zeros_NH, zeros_NH)[: 1 + isinstance(module, nn.LSTM)]
    found = []
    for gates_NG in gates_NTG.unbind(1):
        state = _cell(module, gates_NG, linear(state[0], w_hh, b_hh), state)
        found.append(state[0])
    return torch.stack(found, 1), tuple(part[None] for part in state), gates_NTG


def _weight(module: Any, name: str, dtype: torch.dtype) -> Tensor | None:
    """A parameter, detached; None for a missing bias."""
    if name.startswith("bias") and not module.bias:
        return None
    weight: Tensor = module.get_parameter(name).detach().to(dtype)
    return weight


def _cell(module: Any, from_x: Tensor, from_h: Tensor, state: State) -> State:
    """The next state, from the inputs' and the hidden numbers' shares of the gates."""
    if isinstance(module, nn.RNN):
        return (torch.tanh(from_x + from_h) if module.nonlinearity == "tanh" else torch.relu(from_x + from_h),)
    if isinstance(module, nn.LSTM):
        i, f, g, o = (from_x + from_h).chunk(4, 1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    (r, z, n), (r_h, z_h, n_h) = from_x.chunk(3, 1), from_h.chunk(3, 1)
    new = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return (new + torch.sigmoid(z + z_h) * (state[0] - new),)


def _factors_of_gates(module: Any, tap: Tap, b_NTG: Tensor) -> LayerFactors:
    """The factors of one direction of one layer, from the gradients of its gates."""
    from_h_NTG = _through_reset(module, tap, b_NTG) if isinstance(module, nn.GRU) else b_NTG
    found: LayerFactors = {
        "weight_ih" + tap.suffix: Matrix(tap.x_NTp, b_NTG),
        "weight_hh" + tap.suffix: Matrix(tap.before_NTH, from_h_NTG),
    }
    if module.bias:
        found["bias_ih" + tap.suffix] = sums = Rows(b_NTG.sum(1))
        found["bias_hh" + tap.suffix] = sums if from_h_NTG is b_NTG else Rows(from_h_NTG.sum(1))
    return found


def _through_reset(module: nn.GRU, tap: Tap, b_NTG: Tensor) -> Tensor:
    """The gradients of the hidden numbers' shares: in a GRU's last gate, the reset gate multiplies this share."""
    size, shares = module.hidden_size, []
    for key, inputs in (("ih", tap.x_NTp), ("hh", tap.before_NTH)):
        weight, bias = (_weight(module, f"{name}_{key}{tap.suffix}", inputs.dtype) for name in ("weight", "bias"))
        assert weight is not None
        shares.append(linear(inputs, weight[:size], None if bias is None else bias[:size]))
    reset_NTH = torch.sigmoid(shares[0] + shares[1])
    return torch.cat([b_NTG[:, :, : 2 * size], b_NTG[:, :, 2 * size :] * reset_NTH], 2)

"""LSTM, GRU and RNN: gradients of all gates from one ordinary backward pass.

The gradient of an example needs those of the gates at every step in time, which fused kernels keep to themselves. There
are two ways to them. A layer can be given more inputs than it has, zeros that an identity matrix adds to the gates;
they change nothing, and their gradients are those of the gates. Or the layer can be computed step by step. The first is
for GPUs, where single steps would be nothing but launches, and for narrow layers; for others on a CPU the second takes
half of the time, or a third.

Shapes: `M` sequences, `T` steps in time, `p` inputs, `H` hidden numbers, `G` those of all gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from cdgrab.factors import Factors, Matrix, Rows, by_example

_NARROW = 64  # hidden numbers, below which a CPU spends its time on calling
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Tap:
    """What one direction of one layer saw, and the tensor whose gradients are those of its gates."""

    suffix: str  # of its parameters' names
    x_MTp: Tensor
    before_MTH: Tensor  # the hidden numbers that each step began with
    gates_MTG: Tensor

    def wide(self) -> Tap:
        """In single precision at least, as gradients are looked at; autocast leaves less."""
        dtype = torch.promote_types(self.x_MTp.dtype, torch.float32)
        return replace(self, x_MTp=self.x_MTp.to(dtype), before_MTH=self.before_MTH.to(dtype))


def opens(module: Any) -> bool:
    """Whether a module is of a kind that is served here: not with projections, nor with weights made of others."""
    return (
        type(module) in (nn.LSTM, nn.GRU, nn.RNN)
        and not module.proj_size
        and set(module._flat_weights_names) == module._parameters.keys()
    )


def is_lengthened(module: Any, like: Tensor) -> bool:
    """Whether a module is given more inputs, and not computed step by step."""
    return like.is_cuda or module.hidden_size < _NARROW


def called_with(input: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """Inputs and state of a call."""
    if not isinstance(input, Tensor) or input.ndim != 3:
        raise ValueError("a recurrent layer was called with a packed or single sequence; give it a batch, padded")
    return input, hx


class Opened:
    """A recurrent module, computed so that the gradients of its gates can be had.

    It computes what the module does, with the parameters that were there at the last `copy_weights()`, and leaves taps.

    Args:
        module: An LSTM, GRU or RNN.
        like: Of the type and on the device of what it will be called with.
    """

    def __init__(self, module: Any, like: Tensor) -> None:
        self.like = like.new_empty(0)
        directions = ("", "_reverse")[: 1 + module.bidirectional]
        self._suffixes = [[f"_l{layer}{end}" for end in directions] for layer in range(module.num_layers)]
        kind = _Longer if is_lengthened(module, like) else _StepByStep
        self._parts = {suffix: kind(module, suffix, like) for both in self._suffixes for suffix in both}

    def __call__(self, x_MTp: Tensor, state: Any = None) -> tuple[tuple[Tensor, Any], list[Tap]]:
        """The module's output and last state, and a tap for each direction of each layer."""
        given = tuple(tree_leaves(state)) if state is not None else ()
        taps: list[Tap] = []
        left: list[State] = []
        for both in self._suffixes:
            sides = []
            for suffix in both:
                backwards = suffix.endswith("_reverse")
                inputs_MTp = x_MTp.flip(1) if backwards else x_MTp
                first = tuple(part[len(taps) : len(taps) + 1] for part in given)
                hidden_MTH, last, gates_MTG = self._parts[suffix](inputs_MTp, first)
                sides.append(hidden_MTH.flip(1) if backwards else hidden_MTH)
                begin_M1H = first[0].transpose(0, 1) if first else torch.zeros_like(hidden_MTH[:, :1])
                before_MTH = torch.cat([begin_M1H.detach(), hidden_MTH[:, :-1].detach()], 1)
                left.append(last)
                taps.append(Tap(suffix, inputs_MTp.detach(), before_MTH, gates_MTG))
            x_MTp = torch.cat(sides, 2) if len(sides) > 1 else sides[0]
        ends = tuple(torch.cat(parts) for parts in zip(*left, strict=True))
        return (x_MTp, ends if len(ends) > 1 else ends[0]), taps

    def copy_weights(self) -> None:
        """Before a pass, and not between its forward and backward part."""
        pairs = [pair for part in self._parts.values() for pair in part.copies()]
        whole = [(place, value) for place, value in pairs if place.shape == value.shape]
        with torch.no_grad():
            for place, value in pairs:
                if place.shape != value.shape:
                    place[:, : value.shape[1]] = value
            if whole:
                torch._foreach_copy_([place for place, _ in whole], [value for _, value in whole])  # one launch


class _Longer:
    """One layer in one direction, with an input more for every number of its gates.

    A module, because only these have their weights where a GPU wants them: a copy, and an identity matrix.
    """

    def __init__(self, module: Any, suffix: str, like: Tensor) -> None:
        self._module, self._suffix = module, suffix
        gates, inputs = module.get_parameter("weight_ih" + suffix).shape
        options: dict[str, Any] = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
        # Made without memory first, so that no random number is drawn.
        options |= {"bias": module.bias, "batch_first": True, "dtype": like.dtype, "device": "meta"}
        empty: Any = type(module)(inputs + gates, module.hidden_size, **options)
        self._part = empty.to_empty(device=like.device).requires_grad_(False)
        self._part.weight_ih_l0[:, inputs:] = torch.eye(gates, dtype=like.dtype, device=like.device)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Where weights must be copied to, and what; a place may be longer."""
        return [
            (place, self._module.get_parameter(name.removesuffix("_l0") + self._suffix))
            for name, place in self._part.named_parameters()
        ]

    def __call__(self, x_MTp: Tensor, first: State) -> tuple[Tensor, State, Tensor]:
        """Hidden numbers, the last state, and the zeros that were added to the gates."""
        num, steps, _ = x_MTp.shape
        zeros_MTG = x_MTp.new_zeros(num, steps, len(self._part.weight_ih_l0)).requires_grad_()
        state = None if not first else first if len(first) > 1 else first[0]
        hidden_MTH, last = self._part(torch.cat([x_MTp, zeros_MTG], 2), state)
        return hidden_MTH, tuple(tree_leaves(last)), zeros_MTG


class _StepByStep:
    """One layer in one direction, by hand. Nothing is copied."""

    def __init__(self, module: Any, suffix: str, like: Tensor) -> None:
        self._module, self._suffix, self._dtype = module, suffix, like.dtype
        self._cell: Callable[[Tensor, Tensor, State], State]
        if isinstance(module, nn.RNN):
            act = torch.tanh if module.nonlinearity == "tanh" else torch.relu
            self._cell = lambda from_x, from_h, _: (act(from_x + from_h),)
        else:
            self._cell = _lstm_cell if isinstance(module, nn.LSTM) else _gru_cell

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def __call__(self, x_MTp: Tensor, first: State) -> tuple[Tensor, State, Tensor]:
        """Hidden numbers, the last state, and the inputs' share of the gates."""
        w_ih, w_hh, b_ih, b_hh = (self._weight(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        assert w_ih is not None
        assert w_hh is not None
        gates_MTG = linear(x_MTp, w_ih, b_ih)
        if not gates_MTG.requires_grad:
            gates_MTG.requires_grad_()
        zeros_MH = gates_MTG.new_zeros(len(x_MTp), self._module.hidden_size)
        state = tuple(part[0] for part in first) if first else (zeros_MH, zeros_MH)[: 1 + (self._cell is _lstm_cell)]
        found = []
        for gates_MG in gates_MTG.unbind(1):
            state = self._cell(gates_MG, linear(state[0], w_hh, b_hh), state)
            found.append(state[0])
        return torch.stack(found, 1), tuple(part[None] for part in state), gates_MTG

    def _weight(self, name: str) -> Tensor | None:
        if name.startswith("bias") and not self._module.bias:
            return None
        weight: Tensor = self._module.get_parameter(name + self._suffix).detach().to(self._dtype)
        return weight


def factors_of(module: Any, taps: list[Tap], grads: list[Tensor | None], num: int) -> dict[str, Factors]:
    """Factors of the parameters for `num` examples, each of equally many sequences, from the gradients of the gates."""
    found: dict[str, Factors] = {}
    for tap, grad_MTG in zip(taps, grads, strict=True):
        if grad_MTG is None:
            continue
        b_ih = by_example(grad_MTG, num)
        b_hh = by_example(_through_reset(module, tap, grad_MTG), num) if isinstance(module, nn.GRU) else b_ih
        found["weight_ih" + tap.suffix] = Matrix(by_example(tap.x_MTp, num), b_ih)
        found["weight_hh" + tap.suffix] = Matrix(by_example(tap.before_MTH, num), b_hh)
        if module.bias:
            found["bias_ih" + tap.suffix] = sums = Rows(b_ih.sum(1))
            found["bias_hh" + tap.suffix] = sums if b_hh is b_ih else Rows(b_hh.sum(1))
    return found


def run_again(
    module: Any,
    args: Any,
    kwargs: Any,
    grads: list[Tensor | None],
    num: int,
    kept: dict[nn.Module, Opened],
) -> dict[str, Factors]:
    """Factors of a module's parameters, by a pass of its own.

    On a GPU they are as exact as cuDNN's own gradients are, by the setting for single precision that holds there.

    Args:
        module: That `opens`.
        args: What it was called with, wide.
        kwargs: The same by name.
        grads: Of its outputs, wide; None for those that got none.
        num: Of examples.
        kept: What earlier calls have made, by module.
    """
    x, state = called_with(*args, **kwargs)
    opened = kept.get(module)
    if opened is None or (opened.like.dtype, opened.like.device) != (x.dtype, x.device):
        opened = kept[module] = Opened(module, x)
    opened.copy_weights()
    with torch.enable_grad():
        outputs, taps = opened(x, state)
        known = [(output, grad) for output, grad in zip(tree_leaves(outputs), grads, strict=True) if grad is not None]
        found = torch.autograd.grad(
            [output for output, _ in known],
            [tap.gates_MTG for tap in taps],
            [grad for _, grad in known],
            allow_unused=True,
        )
    with torch.no_grad():
        return factors_of(module, taps, list(found), num)


def _lstm_cell(from_x: Tensor, from_h: Tensor, state: State) -> State:
    i, f, g, o = (from_x + from_h).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_cell(from_x: Tensor, from_h: Tensor, state: State) -> State:
    (r, z, n), (r_h, z_h, n_h) = from_x.chunk(3, 1), from_h.chunk(3, 1)
    new = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return (new + torch.sigmoid(z + z_h) * (state[0] - new),)


def _through_reset(module: nn.GRU, tap: Tap, grad_MTG: Tensor) -> Tensor:
    """What comes from hidden numbers to a GRU's last gate passes its reset gate first."""
    size, of = module.hidden_size, {}
    for key, inputs in (("ih", tap.x_MTp), ("hh", tap.before_MTH)):
        bias = module.get_parameter(f"bias_{key}{tap.suffix}")[:size].to(inputs.dtype) if module.bias else None
        of[key] = linear(inputs, module.get_parameter(f"weight_{key}{tap.suffix}")[:size].to(inputs.dtype), bias)
    reset_MTH = torch.sigmoid(of["ih"] + of["hh"])
    return torch.cat([grad_MTG[:, :, : 2 * size], grad_MTG[:, :, 2 * size :] * reset_MTH], 2)

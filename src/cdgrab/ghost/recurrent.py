"""LSTM, GRU and RNN: gradients of all gates from one ordinary backward pass.

The gradient of an example needs those of the gates at every step in time, which fused kernels keep to themselves. So a
layer is given more inputs than it has: zeros that an identity matrix adds to the gates. They change nothing, and their
gradients are those of the gates.

Shapes: `M` sequences, `T` steps in time, `p` inputs, `H` hidden numbers, `G` those of all gates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from cdgrab.ghost.records import Matrix, Record, Rows, by_example


@dataclass(frozen=True)
class Tap:
    """What one direction of one layer saw, and the zeros whose gradients are those of its gates."""

    suffix: str  # of its parameters' names
    x_MTp: Tensor
    before_MTH: Tensor  # the hidden numbers that each step began with
    zeros_MTG: Tensor

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


def called_with(input: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """Inputs and state of a call."""
    if not isinstance(input, Tensor) or input.ndim != 3:
        raise ValueError("a recurrent layer was called with a packed or single sequence; give it a batch, padded")
    return input, hx


class Opened:
    """A recurrent module with more inputs than it has.

    It computes what the module does, with the parameters that were there at the last `copy_weights()`, and leaves taps.
    Beside a copy of the weights it keeps an identity matrix for each of its gates.

    Args:
        module: An LSTM, GRU or RNN.
        like: Of the type and on the device of what it will be called with.
    """

    def __init__(self, module: Any, like: Tensor) -> None:
        self._module, self.like = module, like.new_empty(0)
        directions = ("", "_reverse")[: 1 + module.bidirectional]
        self._suffixes = [[f"_l{layer}{end}" for end in directions] for layer in range(module.num_layers)]
        # Each is a module of one layer and one direction: only modules have their weights where a GPU wants them.
        self._parts = {suffix: _longer(module, suffix, like) for both in self._suffixes for suffix in both}

    def __call__(self, x_MTp: Tensor, state: Any = None) -> tuple[tuple[Tensor, Any], list[Tap]]:
        """The module's output and last state, and a tap for each direction of each layer."""
        given = tuple(tree_leaves(state)) if state is not None else ()
        taps: list[Tap] = []
        left: list[list[Tensor]] = []
        for both in self._suffixes:
            sides = []
            for suffix in both:
                backwards = suffix.endswith("_reverse")
                first = tuple(part[len(taps) : len(taps) + 1] for part in given)
                hidden_MTH, last, tap = self._run(suffix, x_MTp.flip(1) if backwards else x_MTp, first)
                sides.append(hidden_MTH.flip(1) if backwards else hidden_MTH)
                left.append(last)
                taps.append(tap)
            x_MTp = torch.cat(sides, 2) if len(sides) > 1 else sides[0]
        ends = tuple(torch.cat(parts) for parts in zip(*left, strict=True))
        return (x_MTp, ends if len(ends) > 1 else ends[0]), taps

    def _run(self, suffix: str, x_MTp: Tensor, first: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor], Tap]:
        part = self._parts[suffix]
        num, steps, _ = x_MTp.shape
        zeros_MTG = x_MTp.new_zeros(num, steps, len(part.weight_ih_l0)).requires_grad_()
        state = None if not first else first if len(first) > 1 else first[0]
        hidden_MTH, last = part(torch.cat([x_MTp, zeros_MTG], 2), state)
        begin_M1H = first[0].transpose(0, 1) if first else hidden_MTH.new_zeros(num, 1, part.hidden_size)
        before_MTH = torch.cat([begin_M1H.detach(), hidden_MTH[:, :-1].detach()], 1)
        return hidden_MTH, tree_leaves(last), Tap(suffix, x_MTp.detach(), before_MTH, zeros_MTG)

    def copy_weights(self) -> None:
        """Before a pass, and not between its forward and backward part."""
        wide: list[tuple[Tensor, Tensor]] = []
        whole: list[tuple[Tensor, Tensor]] = []
        for suffix, part in self._parts.items():
            place: Tensor
            for name, place in part.named_parameters():
                value: Tensor = self._module.get_parameter(name.removesuffix("_l0") + suffix)
                (whole if place.shape == value.shape else wide).append((place, value))
        with torch.no_grad():
            for longer, value in wide:
                longer[:, : value.shape[1]] = value
            torch._foreach_copy_([place for place, _ in whole], [value for _, value in whole])  # one launch


def records_of(module: Any, taps: list[Tap], grads: list[Tensor | None], num: int) -> dict[str, Record]:
    """Records of the parameters for `num` examples, each of equally many sequences, from the gradients of the zeros."""
    found: dict[str, Record] = {}
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
) -> dict[str, Record]:
    """Records of a module's parameters, by a pass of its own.

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
            [tap.zeros_MTG for tap in taps],
            [grad for _, grad in known],
            allow_unused=True,
        )
    with torch.no_grad():
        return records_of(module, taps, list(found), num)


def _longer(module: Any, suffix: str, like: Tensor) -> Any:
    """One layer in one direction, with an input more for every number of its gates."""
    gates, inputs = getattr(module, "weight_ih" + suffix).shape
    options: dict[str, Any] = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    # Made without memory first, so that no random number is drawn.
    empty: Any = type(module)(
        inputs + gates,
        module.hidden_size,
        batch_first=True,
        bias=module.bias,
        dtype=like.dtype,
        device="meta",
        **options,
    )
    part = empty.to_empty(device=like.device)
    part.requires_grad_(False)
    part.weight_ih_l0[:, inputs:] = torch.eye(gates, dtype=like.dtype, device=like.device)
    return part


def _through_reset(module: nn.GRU, tap: Tap, grad_MTG: Tensor) -> Tensor:
    """What comes from hidden numbers to a GRU's last gate passes its reset gate first."""
    size, of = module.hidden_size, {}
    for key, inputs in (("ih", tap.x_MTp), ("hh", tap.before_MTH)):
        bias = module.get_parameter(f"bias_{key}{tap.suffix}")[:size].to(inputs.dtype) if module.bias else None
        of[key] = linear(inputs, module.get_parameter(f"weight_{key}{tap.suffix}")[:size].to(inputs.dtype), bias)
    reset_MTH = torch.sigmoid(of["ih"] + of["hh"])
    return torch.cat([grad_MTG[:, :, : 2 * size], grad_MTG[:, :, 2 * size :] * reset_MTH], 2)

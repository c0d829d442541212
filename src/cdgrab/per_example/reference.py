"""The projection of `sketch.py` as one dense matrix, written from its definition: slow, and easy to check."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cdgrab.balancing.tally import WITNESS_SHARE
from cdgrab.per_example.sketch import Paired, Sketch, turn_sizes


def projection(shapes: Mapping[str, torch.Size], matrices: Collection[str], length: int, seed: int) -> Tensor:
    """`dim x k` in float64: `rows @ projection` are the sketches of whole rows."""
    sketch = Sketch(shapes, matrices, length, seed)
    parts, folded = [], 0
    for name, shape in shapes.items():
        if name in sketch.paired:
            parts.append(_paired(sketch.paired[name], shape))
        else:
            signs = sketch._folding._signs[name]
            part = torch.zeros(shape.numel(), length, dtype=torch.float64)
            for i, sign in enumerate(signs.tolist()):
                part[i, (folded + i) % length] = sign
            parts.append(part)
            folded += shape.numel()
    whole = torch.cat(parts)
    return whole @ _rotation(length).T if sketch.watched else whole


def _rotation(length: int) -> Tensor:
    """Every number with those that are whole eighths of the length away."""
    rotation, eighth = torch.zeros(length, length, dtype=torch.float64), length // WITNESS_SHARE
    for new in range(length):
        for old in range(new % eighth, length, eighth):
            differs = bin((new // eighth) & (old // eighth)).count("1") % 2
            rotation[new, old] = (-1) ** differs / math.sqrt(WITNESS_SHARE)
    return rotation


def _paired(paired: Paired, shape: torch.Size) -> Tensor:
    length, half = paired.length, paired.length // 2
    like = torch.zeros(0, dtype=torch.float64)
    rows, columns = turn_sizes(half)
    part = torch.zeros(*shape[:2], math.prod(shape[2:]), half, dtype=torch.complex128)
    for f in range(half):
        x, y = divmod(f, columns)
        turned = y * rows + x
        phases_p = torch.exp(-2j * math.pi * f * torch.arange(shape[1], dtype=torch.float64) / length)
        phases_q = torch.exp(-2j * math.pi * turned * torch.arange(shape[0], dtype=torch.float64) / length)
        inputs_p = phases_p * paired.inputs.signs(like)
        outputs_q = phases_q * paired.outputs.signs(like)
        window_w = paired.window_signs(like)[f]
        part[..., f] = outputs_q[:, None, None] * inputs_p[:, None] * window_w
    return torch.view_as_real(part.flatten(0, 2)).flatten(1) * math.sqrt(2 / length)

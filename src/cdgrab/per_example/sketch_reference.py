"""The projection of `sketch.py` as one dense matrix, written from its definition: slow, and easy to check."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cdgrab.balancing.tally import WITNESS_SHARE
from cdgrab.per_example.sketch import Sketch
from cdgrab.per_example.sketch_maps import Paired, Spread, frequency_grid


def projection(shapes: Mapping[str, torch.Size], matrices: Collection[str], length: int, seed: int) -> Tensor:
    """The projection, `dim x k` in float64: `rows @ projection` are the sketches of whole rows."""
    sketch = Sketch(shapes, matrices, length, seed)
    parts, folded = [], 0
    for name, shape in shapes.items():
        if name in sketch.paired:
            parts.append(_paired(sketch.paired[name], shape))
            continue
        spread = sketch.spread.get(name)
        short = torch.eye(shape.numel(), dtype=torch.float64) if spread is None else _spread(spread, shape)
        part = torch.zeros(shape.numel(), length, dtype=torch.float64)
        for i, sign in enumerate(sketch.folding.signs[name].tolist()):
            part[:, (folded + i) % length] += sign * short[:, i]
        parts.append(part)
        folded += short.shape[1]
    whole = torch.cat(parts)
    return whole @ _rotation(length).T if sketch.watched else whole


def _spread(spread: Spread, shape: torch.Size) -> Tensor:
    """The map of a spread parameter: an entry goes to its place of the longer side, in the group of the shorter."""
    signs_gSl = spread.signs(torch.zeros(0, dtype=torch.float64))
    part = torch.zeros(*shape, spread.size, dtype=torch.float64)
    for output in range(shape[0]):
        for input in range(shape[1]):
            long, short = (output, input) if shape[0] > shape[1] else (input, output)
            within, group = divmod(short, spread.groups)
            part[output, input, group * spread.long + long] = signs_gSl[group, within, long]
    return part.flatten(0, 1)


def _rotation(length: int) -> Tensor:
    """The rotation: it mixes numbers that are whole eighths of the length apart."""
    rotation, eighth = torch.zeros(length, length, dtype=torch.float64), length // WITNESS_SHARE
    for new in range(length):
        for old in range(new % eighth, length, eighth):
            differs = bin((new // eighth) & (old // eighth)).count("1") % 2
            rotation[new, old] = (-1) ** differs / math.sqrt(WITNESS_SHARE)
    return rotation


def _paired(paired: Paired, shape: torch.Size) -> Tensor:
    length, half = paired.length, paired.length // 2
    like = torch.zeros(0, dtype=torch.float64)
    rows, columns = frequency_grid(half)
    part = torch.zeros(*shape[:2], math.prod(shape[2:]), half, dtype=torch.complex128)
    for f in range(half):
        x, y = divmod(f, columns)
        transposed = y * rows + x
        phases_p = torch.exp(-2j * math.pi * f * torch.arange(shape[1], dtype=torch.float64) / length)
        phases_q = torch.exp(-2j * math.pi * transposed * torch.arange(shape[0], dtype=torch.float64) / length)
        inputs_p = phases_p * paired.inputs.signs(like)
        outputs_q = phases_q * paired.outputs.signs(like)
        window_w = paired.window_signs(like)[f]
        part[..., f] = outputs_q[:, None, None] * inputs_p[:, None] * window_w
    return torch.view_as_real(part.flatten(0, 2)).flatten(1) * math.sqrt(2 / length)

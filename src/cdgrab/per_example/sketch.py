"""Sketches gradients: one short row per example, of the same length for every model.

Balancing needs only inner products of gradients, and a random projection preserves them approximately. The projection
depends on the shapes of the parameters in their order, on which of them are matrices, on the length and on a seed.
It is not fitted to data and never saved, and every rank has the same one. There are three kinds of maps. Each parameter
uses one of them, with the full length, and the results are added:

    Paired   for a large matrix with gradient `sum_t outer(b_t, a_t)`: both sides get random signs and a Fourier
             transform, each frequency of one side is multiplied by one of the other (`frequency_grid`), and the
             products are summed over `t`. The gradient is never materialised.
    Spread   for a smaller matrix: every entry gets a random sign, and entries are added up along the shorter side.
             With one position this is a matrix product, `a * (b @ signs)`, which does not materialise the gradient.
    Folded   for all other parameters, and for the result of spreading: random signs, then coordinate `i` is added to
             number `i mod length` (a count sketch).

`cdgrab.per_example.sketch_reference` has the same projection as one dense matrix, slow and easy to check.

All maps are unbiased: over the random signs, the mean of `<sketch(g), sketch(h)>` is `<g, h>`, with a variance of
about `||g||^2 ||h||^2 / length` if gradients are not aligned. The paired map is a TensorSketch (Pham and Pagh, KDD
2013) with a transposition instead of hash functions, which needs no gather.

Shapes: `N` examples, `T` positions, `p` inputs and `q` outputs of a layer, `k` numbers of a sketch, `F = k / 2`
frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cdgrab.arguments import whole_number
from cdgrab.balancing.tally import WITNESS_SHARE
from cdgrab.lanes import generator
from cdgrab.per_example.sketch_maps import Folding, Paired, Spread

DEFAULT_LENGTH = 1024
LEAST_LENGTH = 16
# A matrix with at most this many entries per number of the sketch is spread: a product with its signs then takes less
# time than two Fourier transforms.
SPREAD_ENTRIES = 48


class Sketch:
    """Projects the gradients of a batch, parameter by parameter, and adds up their sketches.

    Args:
        shapes: Shapes of the trainable parameters, by name.
        matrices: Names of the parameters that come as factors of a matrix; the others always come as rows.
        length: The length of a sketch: a power of two, 16 or more.
        seed: The same on all ranks.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], matrices: Collection[str], length: int, seed: int) -> None:
        self.length = checked_length(length)
        rngs = {name: generator(seed, number, "sketch") for number, name in enumerate(shapes)}
        exact = sum(shape.numel() for shape in shapes.values()) <= length  # all folded, without collisions
        kinds = {name: "folded" if exact or name not in matrices else kind_of(shapes[name], length) for name in shapes}
        self.watched = 0 if exact else length // WITNESS_SHARE  # witnesses, at the end
        self.paired = {n: Paired(shapes[n], length, rngs[n]) for n, kind in kinds.items() if kind == "paired"}
        self.spread = {n: Spread(shapes[n], length, rngs[n]) for n, kind in kinds.items() if kind == "spread"}
        sizes = {name: shape.numel() for name, shape in shapes.items() if name not in self.paired}
        sizes |= {name: spread.size for name, spread in self.spread.items()}
        self.folding = Folding(sizes, length, {name: rngs[name] for name in sizes.keys() - self.spread.keys()})
        self._rotation_88: Tensor | None = None
        self._sum_Nk: Tensor | None = None

    def add_rows(self, name: str, rows_ND: Tensor) -> None:
        """Add the gradients of a parameter, one row per example of the batch."""
        if name in self.paired:
            self.add(self.paired[name].of_rows(rows_ND))
        else:
            self.fold(name, self.spread[name].of_rows(rows_ND) if name in self.spread else rows_ND)

    def fold(self, name: str, rows_ND: Tensor) -> None:
        """Add the gradients of a folded parameter, or the result of `spread[name]`."""
        if self.folding.add(name, rows_ND):
            self.add(self.folding.take())

    def add(self, part_Nk: Tensor | None) -> None:
        """Add the result of `paired[name]`, or of folding."""
        if part_Nk is not None:
            self._sum_Nk = part_Nk if self._sum_Nk is None else self._sum_Nk + part_Nk

    def finish(self) -> Tensor:
        """End the batch and return its sketches, `N x k`."""
        self.add(self.folding.take())
        found, self._sum_Nk = self._sum_Nk, None
        assert found is not None, "no gradient came"
        # A non-finite number spreads to its whole row: a row is balanced, or it is left out.
        found = found + 0.0 * found.sum(1, keepdim=True)
        return self._rotated(found) if self.watched else found

    def _rotated(self, sketch_Nk: Tensor) -> Tensor:
        """The sketches, with their eighths mixed by a Hadamard matrix.

        Folding adds a coordinate to one number of the sketch. Without the rotation, coordinates that are added to
        witnesses would never be balanced. With it, every coordinate reaches witnesses and other numbers.
        """
        if self._rotation_88 is None or self._rotation_88.device != sketch_Nk.device:
            self._rotation_88 = _hadamard(WITNESS_SHARE).to(sketch_Nk.device)
        eighths_N8w = torch.unflatten(sketch_Nk, 1, (WITNESS_SHARE, -1))
        return (self._rotation_88.to(sketch_Nk.dtype) @ eighths_N8w).flatten(1)

    def drop(self) -> None:
        """Drop the sketches of an interrupted batch."""
        self.folding.drop()
        self._sum_Nk = None


def kind_of(shape: torch.Size, length: int) -> str:
    """The map of a parameter whose gradients come as factors: paired, spread or folded."""
    if len(shape) > 1 and shape.numel() > SPREAD_ENTRIES * length:
        return "paired"
    return "spread" if len(shape) == 2 else "folded"


def checked_length(length: int) -> int:
    """`length`; raises `ValueError` if a sketch cannot have it."""
    length = whole_number("length", length, least=0)
    if length < LEAST_LENGTH or length & (length - 1):
        raise ValueError(f"length is {length}; choose a power of two, {LEAST_LENGTH} or more, such as {DEFAULT_LENGTH}")
    return length


def _hadamard(size: int) -> Tensor:
    """An orthonormal matrix whose entries differ only in sign; `size` is a power of two."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / math.sqrt(size)

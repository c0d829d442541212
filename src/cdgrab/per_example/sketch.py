"""One short row for every example, of the same length for every model: a sketch of its gradient.

Balancing needs inner products of gradients and nothing else, and a random projection preserves them. The projection
here depends on the shapes of the parameters in their order, on which of them are matrices, on the length and on a seed.
Nothing is fitted to data, nothing is saved, and every rank has the same one. Three kinds of maps share the `length`
numbers. Each parameter uses one, and their results are added, so that every parameter has the full length:

    Paired   for a large matrix with gradient `sum_t outer(b_t, a_t)`: both sides get random signs and a Fourier
             transform, each frequency of one side is multiplied by one of the other (`frequency_grid`), and the
             products are summed over `t`. The gradient is never formed.
    Spread   for a smaller matrix: every entry gets a random sign, and entries are added up along the shorter side.
             With one position that is one matrix product, `a * (b @ signs)`, and no gradient is formed.
    Folded   for all other parameters, and for what spreading gives: random signs, then coordinate `i` is added to
             number `i mod length` (a count sketch).

`cdgrab.per_example.sketch_reference` has the same projection as one dense matrix, which is slow and easy to check.

All maps are unbiased: over the random signs, the mean of `<sketch(g), sketch(h)>` is `<g, h>`, with a variance of
about `||g||^2 ||h||^2 / length` if gradients are not aligned. The paired map is a TensorSketch (Pham and Pagh, KDD
2013) whose hash functions are replaced by a transposition, which a computer reads without gathering.

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
# A matrix with at most this many entries for each number of the sketch is spread. A product with its signs then takes
# less time than two Fourier transforms.
SPREAD_ENTRIES = 48


class Sketch:
    """The projection of a whole model, and the sketches of the batch under way.

    Args:
        shapes: Of the trainable parameters, by name.
        matrices: Names of those that come as factors of a matrix; the others always come as rows.
        length: Numbers of a sketch: a power of two, 16 or more.
        seed: The same on all ranks.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], matrices: Collection[str], length: int, seed: int) -> None:
        self.length = checked_length(length)
        rngs = {name: generator(seed, number, "sketch") for number, name in enumerate(shapes)}
        exact = sum(shape.numel() for shape in shapes.values()) <= length  # all folded, no two numbers meet
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
        """Add the gradients of a parameter, one row for each example of the batch."""
        if name in self.paired:
            self.add(self.paired[name].of_rows(rows_ND))
        else:
            self.fold(name, self.spread[name].of_rows(rows_ND) if name in self.spread else rows_ND)

    def fold(self, name: str, rows_ND: Tensor) -> None:
        """Add the gradients of a parameter that is folded, or what `spread[name]` has made of them."""
        if self.folding.add(name, rows_ND):
            self.add(self.folding.take())

    def add(self, part_Nk: Tensor | None) -> None:
        """Add what `paired[name]` has made of the factors of a parameter."""
        if part_Nk is not None:
            self._sum_Nk = part_Nk if self._sum_Nk is None else self._sum_Nk + part_Nk

    def finish(self) -> Tensor:
        """`N x k`: the sketches of the batch."""
        self.add(self.folding.take())
        found, self._sum_Nk = self._sum_Nk, None
        assert found is not None, "no gradient came"
        # A number that is not finite makes its whole row so: a row is balanced, or it is left out.
        found = found + 0.0 * found.sum(1, keepdim=True)
        return self._rotated(found) if self.watched else found

    def _rotated(self, sketch_Nk: Tensor) -> Tensor:
        """The numbers, eighths of them mixed by a Hadamard matrix.

        Folding puts a coordinate in one place. If witnesses were simply some of the places, coordinates that fall there
        would never be balanced. Rotated, witnesses and the others see all of them.
        """
        if self._rotation_88 is None or self._rotation_88.device != sketch_Nk.device:
            self._rotation_88 = _hadamard(WITNESS_SHARE).to(sketch_Nk.device)
        eighths_N8w = torch.unflatten(sketch_Nk, 1, (WITNESS_SHARE, -1))
        return (self._rotation_88.to(sketch_Nk.dtype) @ eighths_N8w).flatten(1)

    def drop(self) -> None:
        """Forget a batch that broke off."""
        self.folding.drop()
        self._sum_Nk = None


def kind_of(shape: torch.Size, length: int) -> str:
    """How a parameter whose gradients come as factors is sketched: paired, spread or folded."""
    if len(shape) > 1 and shape.numel() > SPREAD_ENTRIES * length:
        return "paired"
    return "spread" if len(shape) == 2 else "folded"


def checked_length(length: int) -> int:
    """`length`, if it is one that a sketch can have."""
    length = whole_number("length", length, least=0)
    if length < LEAST_LENGTH or length & (length - 1):
        raise ValueError(
            f"length is {length}; a sketch has a power of two of numbers, {LEAST_LENGTH} or more, such as "
            f"{DEFAULT_LENGTH}"
        )
    return length


def _hadamard(size: int) -> Tensor:
    """Orthonormal, with entries that differ in sign alone; `size` is a power of two."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / math.sqrt(size)

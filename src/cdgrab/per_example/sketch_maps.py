"""The three maps of a sketch: paired, spread and folded. `sketch.py` says which parameter uses which, and why.

Shapes: `N` examples, `T` positions, `p` inputs and `q` outputs of a layer, `k` numbers of a sketch, `F = k / 2`
frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cdgrab.per_example.scatter import add_at

# The most features materialised at a time: a CPU keeps them in cache, a GPU has room.
MOST_FEATURES = {"cpu": 1 << 18, "cuda": 1 << 24}
# The cost of a Fourier transform and its signs, per number of the sketch, in multiplications of a matrix product.
# Measured on a CPU.
TRANSFORM = 40
_MOST_BUFFERED = 1 << 20  # numbers of rows; then they are folded
_MOST_PADDED = 1 << 22  # cached signs


class Side:
    """Random Fourier features of one side of a matrix.

    Args:
        size: The length of a vector.
        length: The length of the sketch.
        rng: Draws the signs.
        transposed: Whether frequencies come in the transposed order of `frequency_grid`.
    """

    def __init__(self, size: int, length: int, rng: np.random.Generator, *, transposed: bool) -> None:
        self.size, self.length, self._transposed = size, length, transposed
        self._signs_d = torch.from_numpy(rng.integers(0, 2, size) * 2.0 - 1.0)
        self._units_kF: Tensor | None = None  # features of unit vectors, without their signs

    def __call__(self, x_NTd: Tensor) -> Tensor:
        """The features of vectors: `N x T x F`, complex."""
        signed_NTd = x_NTd * self.signs(x_NTd)
        return self._ordered(torch.fft.rfft(_folded(signed_NTd, self.length))[..., : self.length // 2])

    def of_units(self, index: Tensor, like: Tensor) -> Tensor:
        """`index.shape x F`: the features of unit vectors, whose one is at `index`."""
        known = self._units_kF
        if known is None or known.device != like.device or known.dtype != like.dtype.to_complex():
            ones_kk = torch.eye(self.length, dtype=like.dtype, device=like.device)
            known = self._ordered(torch.fft.rfft(ones_kk)[:, : self.length // 2]).contiguous()
            self._units_kF = known
        units = known[index % self.length]
        return units * self.signs(like)[index].view(*index.shape, *[1] * (units.ndim - index.ndim))

    def signs(self, like: Tensor) -> Tensor:
        """The signs, in the type of `like` and on its device."""
        if self._signs_d.dtype != like.dtype or self._signs_d.device != like.device:
            self._signs_d = self._signs_d.to(like)
        return self._signs_d

    def _ordered(self, features: Tensor) -> Tensor:
        if not self._transposed:
            return features
        rows, columns = frequency_grid(self.length // 2)
        # A view: the transposition costs nothing in the product.
        return torch.unflatten(features, -1, (columns, rows)).mT

    def matched(self, features: Tensor) -> Tensor:
        """Features that are not transposed, in the shape of transposed ones."""
        return torch.unflatten(features, -1, frequency_grid(self.length // 2))


class Paired:
    """The map of one large matrix: `sum_t features(b_t) * features(a_t)`.

    A convolution's input is a patch. Its features are summed over the window: those of the channels at each place,
    times the random signs of the place.

    Args:
        shape: The shape of the parameter: outputs, inputs (or channels), then the window of a convolution.
        length: The length of the sketch.
        rng: Draws the signs.
    """

    def __init__(self, shape: torch.Size, length: int, rng: np.random.Generator) -> None:
        self.length = length
        self.inputs = Side(shape[1], length, rng, transposed=False)
        self.outputs = Side(shape[0], length, rng, transposed=True)
        self.window = tuple(shape[2:])
        places = math.prod(self.window)
        signs_Fw = rng.integers(0, 2, (length // 2, places)) * 2.0 - 1.0
        self._window_signs_Fw = torch.from_numpy(signs_Fw if places > 1 else np.ones_like(signs_Fw))

    def prefers_rows(self, positions: int, per_position: float) -> bool:
        """Whether materialising a gradient and sketching it costs less than the features of all positions.

        `per_position` is the cost of a position's features, in Fourier transforms. Both ways give the same numbers.
        """
        (q, p), window = (self.outputs.size, self.inputs.size), math.prod(self.window)
        transform = TRANSFORM * self.length
        return q * window * transform + positions * p * q * window < positions * per_position * transform

    def summed(self, a_NTp: Tensor, b_NTq: Tensor) -> Tensor:
        """`N x k`: the sketches of `sum_t outer(b_t, a_t)`, some examples at a time so that features stay in cache."""
        if self.prefers_rows(a_NTp.shape[1], 2):
            return self.of_rows((b_NTq.mT @ a_NTp).flatten(1))
        some = self.at_a_time(a_NTp, a_NTp.shape[1])
        parts = [
            self.product(self.inputs(a), self.outputs(b))
            for a, b in zip(a_NTp.split(some), b_NTq.split(some), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def at_a_time(self, like: Tensor, positions: int) -> int:
        """The number of examples, with `positions` each, to sketch at a time."""
        return max(1, MOST_FEATURES.get(like.device.type, 1 << 18) // (max(1, positions) * self.length))

    def product(self, a_NTF: Tensor, b_NTF: Tensor) -> Tensor:
        """`N x k`: the sketches, from the features of both sides."""
        product_NTF = self.inputs.matched(a_NTF) * b_NTF
        total_NF = product_NTF.sum(1) if product_NTF.shape[1] != 1 else product_NTF[:, 0]
        return torch.view_as_real(total_NF).flatten(1) * math.sqrt(2 / self.length)

    def of_rows(self, rows_ND: Tensor) -> Tensor:
        """`N x k`: the sketches of gradients that are rows."""
        (q, p), window = (self.outputs.size, self.inputs.size), math.prod(self.window)
        b_qF = self.outputs.of_units(torch.arange(q, device=rows_ND.device), rows_ND)
        parts = []
        for some_nD in rows_ND.split(self.at_a_time(rows_ND, q * window)):
            a_nqwF = self.inputs(some_nD.view(len(some_nD), q, p, window).mT)
            a_nqF = (a_nqwF * self.window_signs(rows_ND).T).sum(2) if window > 1 else a_nqwF[:, :, 0]
            parts.append(self.product(a_nqF, b_qF[None]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def window_signs(self, like: Tensor) -> Tensor:
        """`F x w`: the signs of every place of a convolution's window, for every frequency."""
        if self._window_signs_Fw.dtype != like.dtype or self._window_signs_Fw.device != like.device:
            self._window_signs_Fw = self._window_signs_Fw.to(like)
        return self._window_signs_Fw


class Spread:
    """The map of a smaller matrix: adds up its entries, with random signs, along the shorter side.

    Entries that share a place of the longer side go to `groups` sums, so that the sketch is filled.

    Args:
        shape: Outputs and inputs.
        length: The length of the sketch.
        rng: Draws the signs.
    """

    def __init__(self, shape: torch.Size, length: int, rng: np.random.Generator) -> None:
        self.by_output = shape[0] > shape[1]  # whether outputs are the longer side
        self.short, self.long = sorted(shape)
        self.groups = min(self.short, -(-length // self.long))
        self.size = self.groups * self.long
        signs_ls = rng.integers(0, 2, (self.long, self.short)) * 2.0 - 1.0
        self._missing = -self.short % self.groups
        # Place `s` of the shorter side belongs to group `s mod groups`; zeros fill the last places.
        padded = np.pad(signs_ls, ((0, 0), (0, self._missing))).reshape(self.long, -1, self.groups)
        self._signs_gSl = torch.from_numpy(np.ascontiguousarray(padded.transpose(2, 1, 0)))

    def of_rows(self, rows_ND: Tensor) -> Tensor:
        """`N x size`: the sums of gradients that are rows."""
        matrix = rows_ND.view(len(rows_ND), *((self.long, self.short) if self.by_output else (self.short, self.long)))
        grouped_NgSl = self._grouped(matrix if self.by_output else matrix.mT).permute(0, 3, 2, 1)
        return (grouped_NgSl * self.signs(rows_ND)).sum(2).flatten(1)

    def of_outer(self, a_Np: Tensor, b_Nq: Tensor) -> Tensor:
        """`N x size`: the sums of gradients `outer(b, a)`, from their factors."""
        long_Nl, short_Ns = (b_Nq, a_Np) if self.by_output else (a_Np, b_Nq)
        signs_gSl = self.signs(a_Np)
        if self.groups == 1:
            return long_Nl * (short_Ns @ signs_gSl[0])
        sums_gNl = self._grouped(short_Ns).permute(2, 0, 1) @ signs_gSl
        return (sums_gNl * long_Nl).transpose(0, 1).flatten(1)

    def of_lookups(self, index_NT: Tensor, b_NTq: Tensor) -> Tensor:
        """`N x size`: the sums of gradients of a table, of which position `t` used line `index_t`."""
        signs_gSl, found_Ns = self.signs(b_NTq), b_NTq.new_zeros(len(b_NTq), self.size)
        if self.by_output:  # the numbers of a line are added up, group by group
            values = (signs_gSl.permute(2, 0, 1)[index_NT] * self._grouped(b_NTq).mT).sum(3)
            place = index_NT[..., None] + torch.arange(self.groups, device=b_NTq.device) * self.long
        else:  # lines are added up
            group_NT = index_NT % self.groups
            values = signs_gSl[group_NT, index_NT // self.groups] * b_NTq
            place = group_NT[..., None] * self.long + torch.arange(self.long, device=b_NTq.device)
        first_N = torch.arange(len(b_NTq), device=b_NTq.device) * self.size
        add_at(found_Ns.view(-1), first_N[:, None, None] + place, values)
        return found_Ns

    def signs(self, like: Tensor) -> Tensor:
        """The signs, `groups x S x long`, in the type of `like` and on its device."""
        if self._signs_gSl.dtype != like.dtype or self._signs_gSl.device != like.device:
            self._signs_gSl = self._signs_gSl.to(like)
        return self._signs_gSl

    def _grouped(self, short: Tensor) -> Tensor:
        """`short` with its last dimension, the shorter side, as `S x groups`."""
        if self._missing:
            short = torch.nn.functional.pad(short, (0, self._missing))
        return torch.unflatten(short, -1, (-1, self.groups))


class Folding:
    """The map of all other parameters: adds each to the sketch with random signs, from a place of its own on.

    Rows are buffered until there are many, or until the sketch is due: folding them together takes three calls.

    Args:
        sizes: The size of each parameter.
        length: The length of the sketch.
        rngs: Draw the signs. Parameters without a generator have their signs already.
    """

    def __init__(self, sizes: Mapping[str, int], length: int, rngs: Mapping[str, np.random.Generator]) -> None:
        self._length = length
        signs = {name: rngs[name].integers(0, 2, size) * 2.0 - 1.0 for name, size in sizes.items() if name in rngs}
        self.signs = {name: torch.from_numpy(signs.get(name, np.ones(size))) for name, size in sizes.items()}
        # Zeros before and after a parameter's row: it then begins at its place, and fills whole lengths of the sketch.
        starts = (np.cumsum([0, *sizes.values()]) % length).tolist()
        self._margins = {
            name: (start, -(start + size) % length) for (name, size), start in zip(sizes.items(), starts, strict=False)
        }
        self._padded: dict[tuple[str, ...], Tensor] = {}  # signs with zeros, by the parameters folded together
        self._scratch = torch.empty(0)
        self._names: list[str] = []
        self._rows: list[Tensor] = []
        self._num_buffered = 0

    def add(self, name: str, rows_ND: Tensor) -> bool:
        """Buffer the rows of a parameter; returns whether it is time to fold."""
        self._names.append(name)
        self._rows.append(rows_ND)
        self._num_buffered += rows_ND.numel()
        return self._num_buffered >= _MOST_BUFFERED

    def take(self) -> Tensor | None:
        """Empty the buffer and return the sum of its rows, folded (`N x k`), or None if it is empty."""
        names, rows = tuple(self._names), self._rows
        self.drop()
        if not rows:
            return None
        zero_N1 = rows[0].new_zeros(len(rows[0]), 1)
        parts = []
        for name, rows_ND in zip(names, rows, strict=True):
            before, after = self._margins[name]
            if before:
                parts.append(zero_N1.expand(-1, before))
            parts.append(rows_ND)
            if after:
                parts.append(zero_N1.expand(-1, after))
        joined = torch.cat(parts, 1, out=self._scratch_of(rows[0], sum(part.shape[1] for part in parts)))
        joined *= self._signs_of(names, joined)
        return torch.unflatten(joined, 1, (-1, self._length)).sum(1)

    def alone(self, name: str, rows_ND: Tensor) -> Tensor:
        """`N x k`: the rows of one parameter, folded; nothing waits."""
        padded = torch.nn.functional.pad(rows_ND * self.signs[name].to(rows_ND), self._margins[name])
        return torch.unflatten(padded, 1, (-1, self._length)).sum(1)

    def drop(self) -> None:
        """Empty the buffer."""
        self._names, self._rows, self._num_buffered = [], [], 0

    def _scratch_of(self, like: Tensor, width: int) -> Tensor:
        """Memory for `N x width` numbers, kept between calls: allocating it takes a CPU longer than filling it."""
        if (
            self._scratch.numel() < len(like) * width
            or self._scratch.dtype != like.dtype
            or self._scratch.device != like.device
        ):
            self._scratch = like.new_empty(len(like) * width)
        return self._scratch[: len(like) * width].view(len(like), width)

    def _signs_of(self, names: tuple[str, ...], like: Tensor) -> Tensor:
        known = self._padded.get(names)
        if known is None or known.dtype != like.dtype or known.device != like.device:
            padded = [torch.nn.functional.pad(self.signs[name], self._margins[name]) for name in names]
            known = torch.cat(padded).to(like)
            if sum(map(len, self._padded.values())) > _MOST_PADDED:  # passes keep coming in other orders
                self._padded.clear()
            self._padded[names] = known
        return known


def frequency_grid(frequencies: int) -> tuple[int, int]:
    """Rows and columns of the grid that pairs frequencies: the inputs' fill it row by row, the outputs' by columns.

    Frequency `f = x * columns + y` of the inputs is paired with frequency `y * rows + x` of the outputs. Neighbouring
    frequencies are alike if a side is shorter than the sketch. The grid pairs them with frequencies that lie far apart.
    """
    rows = 1 << ((frequencies.bit_length() - 1) // 2)
    return rows, frequencies // rows


def _folded(x: Tensor, length: int) -> Tensor:
    """`x` with coordinate `i` added to place `i mod length`; places without a coordinate are 0."""
    missing = -x.shape[-1] % length
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return padded if padded.shape[-1] == length else torch.unflatten(padded, -1, (-1, length)).sum(-2)

"""What a backward pass knows of each example's gradient of one parameter, and what can be computed from it.

A linear layer with inputs `a` and output gradients `b` has, for example `i`, the gradient `sum_t outer(b_it, a_it)`.
Inner products of such gradients, inner products with a matrix `R`, and weighted sums of them need `a` and `b` only.
Three forms cover every layer:

    Matrix   factors `a` and `b`, as above
    Lookup   the same for an embedding, whose `a` says which row of the table was used
    Rows     the gradients themselves, where they are small, or where there is no other way

Convolutions (`convolved.py`) have a form of their own, and so have sums (`Summed`), until it is known what is wanted of
them.
A difference of two gradients has the factors of both (`Pair`).

Shapes: `N` examples, `T` positions, `p` inputs, `q` outputs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from cdgrab.balance.tables import table, takes_triton

MOST_NUMBERS = 1 << 24  # of rows that are formed at a time, on their way to inner products
MOST_NUMBERS_ON_GPU = 1 << 26
FEW_ROWS = 4  # of the whole model, that are formed at a time, and on a GPU up to 16
MOST_NUMBERS_OF_ROWS = 1 << 28  # that these have on a CPU
_LONG_ROW = 1 << 18  # numbers from which on rows are cleared one by one
_MOST_POSITIONS = 2048  # of a lookup: the kernel compares all of them with each other

Self = TypeVar("Self", bound="Record")


class Record(Protocol):
    """Gradients of `N` examples with respect to one parameter."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it consists of; the first dimension of each is that of the examples."""

    def like(self: Self, tensors: tuple[Tensor, ...]) -> Self:
        """The same with other tensors."""

    def negated(self: Self) -> Self: ...

    def scaled(self: Self, factor: float) -> Self: ...

    def rows(self) -> Tensor:
        """`N x numel`: the gradients, written out."""

    def compact(self) -> Record:
        """What is worth keeping of it: as rows, if these take fewer numbers."""

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """`N x N` inner products with each other; `N` with `r`, which has the shape of the parameter."""

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        """Add the gradients, each times its weight, to `r`. An example of weight 0 may be anything."""


@dataclass(frozen=True)
class Rows:
    """Gradients as rows."""

    rows_ND: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows_ND,)

    def like(self, tensors: tuple[Tensor, ...]) -> Rows:
        return Rows(*tensors)

    def negated(self) -> Rows:
        return Rows(-self.rows_ND)

    def scaled(self, factor: float) -> Rows:
        return Rows(self.rows_ND * factor)

    def rows(self) -> Tensor:
        return self.rows_ND

    def compact(self) -> Rows:
        return self

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows_ND @ self.rows_ND.T, self.rows_ND @ r.reshape(-1)

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        r.view(-1).addmv_(kept(self.rows_ND, weights_N).T, weights_N)


@dataclass(frozen=True)
class Summed:
    """Gradients that are sums over positions, as those of biases and norms."""

    vectors_NTp: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.vectors_NTp,)

    def like(self, tensors: tuple[Tensor, ...]) -> Summed:
        return Summed(*tensors)

    def negated(self) -> Summed:
        return Summed(-self.vectors_NTp)

    def scaled(self, factor: float) -> Summed:
        return Summed(self.vectors_NTp * factor)

    def rows(self) -> Tensor:
        return self.vectors_NTp.sum(1)

    def compact(self) -> Rows:
        return Rows(self.rows())

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.compact().products(r)

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        self.compact().add_to(r, weights_N)


@dataclass(frozen=True)
class Matrix:
    """Gradients `sum_t outer(b_t, a_t)` of a `q x p` parameter."""

    a_NTp: Tensor
    b_NTq: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a_NTp, self.b_NTq)

    def like(self, tensors: tuple[Tensor, ...]) -> Matrix:
        return Matrix(*tensors)

    def negated(self) -> Matrix:
        return Matrix(self.a_NTp, -self.b_NTq)

    def scaled(self, factor: float) -> Matrix:
        return Matrix(self.a_NTp, self.b_NTq * factor)

    def rows(self) -> Tensor:
        return (self.b_NTq.mT @ self.a_NTp).flatten(1)

    def compact(self) -> Matrix | Rows:
        (_, positions, p), q = self.a_NTp.shape, self.b_NTq.shape[2]
        return Rows(self.rows()) if p * q <= positions * (p + q) else self

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return Pair(self, None).products(r)

    def dots(self, r_qp: Tensor) -> Tensor:
        """With `r` alone."""
        # The longer side goes through `r`, whichever that is; the cost is the same, the memory is not.
        if self.a_NTp.shape[2] <= self.b_NTq.shape[2]:
            return ((self.b_NTq @ r_qp) * self.a_NTp).sum((1, 2))
        return ((self.a_NTp @ r_qp.T) * self.b_NTq).sum((1, 2))

    def inner(self, other: Matrix) -> Tensor:
        """`N x N`: inner products of the gradients with those of `other`, from factors."""
        products: Tensor = self.a_NTp.flatten(0, 1) @ other.a_NTp.flatten(0, 1).T
        products.mul_(self.b_NTq.flatten(0, 1) @ other.b_NTq.flatten(0, 1).T)
        num, positions = self.a_NTp.shape[:2]
        return products.view(num, positions, num, -1).sum((1, 3)) if products.numel() > num**2 else products

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        a, b = kept(self.a_NTp, weights_N), kept(self.b_NTq, weights_N)
        r.view(b.shape[2], -1).addmm_((b * weights_N[:, None, None]).flatten(0, 1).T, a.flatten(0, 1))


@dataclass(frozen=True)
class Pair:
    """Differences of two sets of factors, which are not copied for it. Without a second: the first."""

    first: Matrix
    second: Matrix | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.first.tensors + (() if self.second is None else self.second.tensors)

    def like(self, tensors: tuple[Tensor, ...]) -> Pair:
        return Pair(Matrix(*tensors[:2]), None if self.second is None else Matrix(*tensors[2:]))

    def negated(self) -> Pair:
        return Pair(self.first.negated(), None if self.second is None else self.second.negated())

    def scaled(self, factor: float) -> Pair:
        return Pair(self.first.scaled(factor), None if self.second is None else self.second.scaled(factor))

    def rows(self) -> Tensor:
        return self._rows(0, self.first.b_NTq.shape[2])

    def compact(self) -> Pair:
        return self

    def joined(self) -> Matrix:
        """The factors of both."""
        if self.second is None:
            return self.first
        (a, b), (minus_a, minus_b) = self.first.tensors, self.second.tensors
        if a.shape[2] < b.shape[2]:  # the narrower side has the sign
            minus_a = -minus_a
        else:
            minus_b = -minus_b
        return Matrix(torch.cat([a, minus_a], 1), torch.cat([b, minus_b], 1))

    def prefers_factors(self) -> bool:
        """Whether inner products of factors cost less than forming rows and multiplying these."""
        (num, _, p), q = self.first.a_NTp.shape, self.first.b_NTq.shape[2]
        return prefers_factors(num, sum(matrix.a_NTp.shape[1] for matrix in self._both), p, q)

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        (num, _, p), q = self.first.a_NTp.shape, self.first.b_NTq.shape[2]
        r_qp = r.view(q, p)  # a convolution's is of more dimensions
        if self.prefers_factors():
            dots_N = self.first.dots(r_qp)
            return self._gram_of_factors(), dots_N if self.second is None else dots_N - self.second.dots(r_qp)
        if r.is_cuda:
            return self._products_there(r_qp)
        gram_NN, dots_N = r.new_zeros(num, num), r.new_zeros(num)
        width = max(1, MOST_NUMBERS // (num * p))
        for start in range(0, q, width):  # some outputs at a time: rows of the whole layer may not fit
            some_ND = self._rows(start, start + width)
            gram_NN.addmm_(some_ND, some_ND.T)
            dots_N.addmv_(some_ND, r_qp[start : start + width].flatten())
        return gram_NN, dots_N

    def _products_there(self, r_qp: Tensor) -> tuple[Tensor, Tensor]:
        """The same on a GPU, where rows are better written once than added to, and read once."""
        a_NSp, b_NSq = self.joined().tensors
        width = max(1, MOST_NUMBERS_ON_GPU // (len(a_NSp) * a_NSp.shape[2]))
        parts = zip(b_NSq.split(width, 2), r_qp.split(width), strict=True)
        tables = [table((b_NSw.mT @ a_NSp).flatten(1), None, r_wp.flatten()) for b_NSw, r_wp in parts]
        found_NN1 = tables[0] if len(tables) == 1 else torch.stack(tables).sum(0)
        return found_NN1[:, :-1], found_NN1[:, -1]

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        self.first.add_to(r, weights_N)
        if self.second is not None:
            self.second.add_to(r, -weights_N)

    @property
    def _both(self) -> list[Matrix]:
        return [self.first] if self.second is None else [self.first, self.second]

    def _rows(self, start: int, stop: int) -> Tensor:
        rows_Nwp = self.first.b_NTq[:, :, start:stop].mT @ self.first.a_NTp
        if self.second is not None:
            rows_Nwp.baddbmm_(self.second.b_NTq[:, :, start:stop].mT, self.second.a_NTp, alpha=-1)
        return rows_Nwp.flatten(1)

    def _gram_of_factors(self) -> Tensor:
        gram_NN = self.first.inner(self.first)
        if self.second is None:
            return gram_NN
        cross_NN = self.first.inner(self.second)
        return gram_NN.add_(self.second.inner(self.second)).sub_(cross_NN).sub_(cross_NN.T)


@dataclass(frozen=True)
class Lookup:
    """Gradients of a `num_rows x q` table of which position `t` used row `index_t`."""

    index_NT: Tensor
    b_NTq: Tensor
    num_rows: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.index_NT, self.b_NTq)

    def like(self, tensors: tuple[Tensor, ...]) -> Lookup:
        index_NT, b_NTq = tensors
        return Lookup(index_NT, b_NTq, self.num_rows)

    def negated(self) -> Lookup:
        return Lookup(self.index_NT, -self.b_NTq, self.num_rows)

    def scaled(self, factor: float) -> Lookup:
        return Lookup(self.index_NT, self.b_NTq * factor, self.num_rows)

    def rows(self) -> Tensor:
        return self._dense(self.index_NT, self.num_rows).flatten(1)

    def compact(self) -> Lookup:
        return self

    def add_rows(self, place_ND: Tensor, *, turned: bool = False) -> None:
        """Add to rows that are columns of a larger tensor; `turned`, as in `write_rows`."""
        q = self.b_NTq.shape[2]
        strides = (1, self.num_rows) if turned else (q, 1)
        if self.b_NTq.shape[1] <= _MOST_POSITIONS and takes_triton(self.b_NTq, place_ND):
            from cdgrab.ghost import kernels

            kernels.add_lookups(self.index_NT, self.b_NTq, place_ND, strides)
            return
        num, row = len(place_ND), place_ND.stride(0)
        # Number by number from its beginning to its end: what lies between rows is not touched.
        flat = place_ND.as_strided(((num - 1) * row + place_ND.shape[1],), (1,))
        first_NT = torch.arange(num, device=flat.device)[:, None] * row + self.index_NT * strides[0]
        index_NTq = first_NT[:, :, None] + torch.arange(q, device=flat.device) * strides[1]
        flat.index_add_(0, index_NTq.flatten(), self.b_NTq.flatten())

    def total(self) -> Tensor:
        """The sum over examples, `num_rows x q`, as the layer itself would find it."""
        b_Mq, index_M = self.b_NTq.flatten(0, 1), self.index_NT.flatten()
        found: Tensor = torch.ops.aten.embedding_dense_backward(b_Mq, index_M, self.num_rows, -1, False)
        return found

    def as_matrix(self) -> Matrix:
        """For a table that is also the weight of a linear layer, whose output it then is."""
        used_NTV = torch.nn.functional.one_hot(self.index_NT.long(), self.num_rows).to(self.b_NTq.dtype)
        return Matrix(self.b_NTq, used_NTV)

    @property
    def dense(self) -> bool:
        """Whether inner products are found from rows of the whole table, which is small enough."""
        return self.b_NTq.is_cuda and len(self.b_NTq) * self.num_rows * self.b_NTq.shape[2] <= MOST_NUMBERS_ON_GPU

    def products(self, r: Tensor) -> tuple[Tensor, Tensor]:
        if self.dense:  # a GPU need not count the tokens that are there
            rows_ND = self.rows()
            return rows_ND @ rows_ND.T, rows_ND @ r.view(-1)
        return self._gram(), (r[self.index_NT] * self.b_NTq).sum((1, 2))

    def _gram(self) -> Tensor:
        num, q = len(self.index_NT), self.b_NTq.shape[2]
        tokens, place_NT = torch.unique(self.index_NT, return_inverse=True)
        gram_NN = self.b_NTq.new_zeros(num, num)
        width = max(1, MOST_NUMBERS // (num * q))
        for start in range(0, len(tokens), width):  # some tokens at a time
            inside = (place_NT >= start) & (place_NT < start + width)
            some_ND = self._dense(torch.where(inside, place_NT - start, width), width + 1)[:, :-1].flatten(1)
            gram_NN.addmm_(some_ND, some_ND.T)
        return gram_NN

    def add_to(self, r: Tensor, weights_N: Tensor) -> None:
        weighted = kept(self.b_NTq, weights_N) * weights_N[:, None, None]
        r.index_add_(0, self.index_NT.flatten(), weighted.flatten(0, 1))

    def _dense(self, index_NT: Tensor, num_rows: int) -> Tensor:
        num, _, q = self.b_NTq.shape
        offset_N1 = torch.arange(num, device=index_NT.device)[:, None] * num_rows
        flat = self.b_NTq.new_zeros(num * num_rows, q)
        flat.index_add_(0, (index_NT + offset_N1).flatten(), self.b_NTq.flatten(0, 1))
        return flat.view(num, num_rows, q)


def prefers_factors(num: int, positions: int, p: int, q: int) -> bool:
    """Whether inner products of factors cost less than forming rows and multiplying these."""
    rows = (2 * positions + num) * p * q  # formed, multiplied; and added, as factors are in both cases
    return num * positions**2 * (p + q) + 2 * positions * p * q <= rows


def mostly_rows(by_factors: int, total: int) -> bool:
    """Whether a model is balanced by rows, so many of whose weights prefer factors: a few of these may do without."""
    return 4 * by_factors <= total


def subtracted(first: Record | None, second: Record | None) -> Record:
    """Differences, example by example. What is not there got no gradient."""
    if isinstance(first, Matrix) and isinstance(second, Matrix):
        return Pair(first, second)
    if isinstance(first, Rows) and isinstance(second, Rows):
        return Rows(first.rows_ND - second.rows_ND)
    parts = [] if first is None else [first]
    return total(parts if second is None else [*parts, second.negated()])


def total(records: list[Record]) -> Record:
    """The gradients of a parameter that was used several times: their sum."""
    if len(records) == 1:
        return records[0]
    kinds = {type(record) for record in records}
    if kinds == {Matrix, Lookup}:
        records = [record.as_matrix() if isinstance(record, Lookup) else record for record in records]
    elif len(kinds) > 1 or kinds == {Rows}:
        return Rows(sum((record.rows() for record in records[1:]), records[0].rows()))
    return records[0].like(tuple(torch.cat(parts, dim=1) for parts in zip(*(r.tensors for r in records), strict=True)))


def apart(record: Record, x: Tensor) -> Record:
    """The same, with nothing that lies where `x` does."""
    storage = x.untyped_storage().data_ptr()
    here = [tensor.untyped_storage().data_ptr() == storage for tensor in record.tensors]
    if not any(here):
        return record
    return record.like(tuple(t.clone() if is_here else t for t, is_here in zip(record.tensors, here, strict=True)))


def by_example(x: Tensor, num: int) -> Tensor:
    """`N x T x features`. A batch flattened into `N * T` rows, example by example, is taken apart again."""
    return x.reshape(num, -1, x.shape[-1])


def stacked(records: list[Record]) -> Record:
    """The examples of several records, one after the other."""
    if len(records) == 1:
        return records[0]
    if len({type(record) for record in records}) > 1:
        return Rows(torch.cat([record.rows() for record in records]))
    pairs = [record for record in records if isinstance(record, Pair)]
    if pairs:
        first: Any = stacked([pair.first for pair in pairs])
        second: Any = stacked([pair.second for pair in pairs if pair.second is not None])
        return Pair(first, second)
    if isinstance(records[0], (Matrix, Lookup)):
        # Sequences of unequal length: positions that are not there have no gradient.
        longest = max(record.tensors[0].shape[1] for record in records)
        records = [_lengthened(record, longest) for record in records]
    return records[0].like(tuple(torch.cat(parts) for parts in zip(*(r.tensors for r in records), strict=True)))


def taken(record: Record, index: Tensor) -> Record:
    """Some of the examples."""
    return record.like(tuple(tensor[index] for tensor in record.tensors))


def written_out(records: dict[str, Record], shapes: dict[str, torch.Size]) -> Tensor:
    """One row for every example, parameters in the order of `shapes`; one without a gradient counts as zero."""
    some = next(iter(records.values())).rows()
    return torch.cat(
        [
            records[name].rows() if name in records else some.new_zeros(len(some), shape.numel())
            for name, shape in shapes.items()
        ],
        dim=1,
    )


def write_rows(parts: list[Record], place_ND: Tensor, *, written: bool = False, turned: bool = False) -> None:
    """The sum of `parts` as rows, into columns of a larger tensor; of none, zero. Added to what is `written` there.

    `written_out` for a GPU: products go where they belong, and nothing is joined or formed to be copied. Of a matrix
    that is `turned`, which is a parameter of linear layers and lookups only, the transpose is written.
    """
    # Whatever is not a lookup writes all of the place, which then need not be zero before.
    for record in sorted(parts, key=lambda record: isinstance(record, Lookup)):
        if isinstance(record, Matrix):
            first, second = (record.a_NTp, record.b_NTq) if turned else (record.b_NTq, record.a_NTp)
            place_ND.unflatten(1, (first.shape[2], -1)).baddbmm_(first.mT, second, beta=int(written))
        elif not isinstance(record, Lookup):
            place_ND.copy_(place_ND + record.rows() if written else record.rows())
        else:
            if not written:
                _clear(place_ND)
            record.add_rows(place_ND, turned=turned)
        written = True
    if not written:
        _clear(place_ND)


def _clear(place_ND: Tensor) -> None:
    if place_ND.shape[1] < _LONG_ROW:
        place_ND.zero_()
        return
    for row_D in place_ND:  # each lies in one piece, which is filled twice as fast
        row_D.zero_()


def _lengthened(record: Record, positions: int) -> Record:
    missing = positions - record.tensors[0].shape[1]
    if missing == 0:
        return record
    return record.like(tuple(pad(t, (0, 0) * (t.ndim - 2) + (0, missing)) for t in record.tensors))


def kept(tensor: Tensor, weights_N: Tensor) -> Tensor:
    """Zero where the weight is: zero times something that is not finite is not zero."""
    if tensor.device.type == "cpu" and bool(weights_N.all()):
        return tensor
    return torch.where((weights_N != 0).view(-1, *[1] * (tensor.ndim - 1)), tensor, 0.0)

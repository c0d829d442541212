"""Rows from a backward pass that stops at the layers, against a backward pass for every example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _inputs import randn
from _models import MODELS, build, one_by_one
from _streams import Line, lines_for_streams
from _tied import TiedTable, check_tied_table
from cdgrab.per_example.convolution import Geometry, patches
from cdgrab.per_example.factors import write_rows
from cdgrab.sources import rows
from cdgrab.sources.rows import ExampleRows, _Writing


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_rows(name: str, dtype: torch.dtype) -> None:
    model, x, y = build(name, 6, dtype)
    expected = one_by_one(model, x, y)
    rows_of = ExampleRows(model)
    near: Any = {"rtol": 1e-4 if dtype == torch.float32 else 1e-10, "atol": 1e-6}
    for _ in range(2):  # nothing is left from one batch to the next
        sums = torch.full_like(expected[0], torch.nan)
        found = rows_of(lambda: F.cross_entropy(model(x), y), 6, sums_D=sums)
        torch.testing.assert_close(6 * found, expected, **near)
        torch.testing.assert_close(6 * sums, expected.sum(0), **near)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_without_a_gradient_gets_none() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.idle = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)  # type: ignore[no-any-return]

    model, x = Half(), randn(4, 3)
    found = ExampleRows(model)(lambda: F.cross_entropy(model(x), torch.arange(4) % 2), 4)
    assert found.shape == (4, 24)
    assert bool(found[:, :8].any(1).all())
    assert not found[:, 8:].any()


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("words", [5, 80])
@pytest.mark.parametrize("many", [0, 1 << 27])  # whether the sum is read before the lookups come
def test_a_table_with_several_uses(many: int, words: int, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MANY", many)
    monkeypatch.setattr(rows, "_LARGE", 0)
    check_tied_table(words, answers)


@pytest.mark.parametrize("many", [0, 1 << 27])
def test_a_table_without_a_gradient(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MANY", many)

    class Idle(TiedTable):
        def forward(self, index: Tensor) -> Tensor:
            x = torch.ones(len(index), 4)
            self.head(x), self.table(index)
            return self.out(x)  # type: ignore[no-any-return]

    model = Idle(5, True)
    rows_of = ExampleRows(model)
    index = torch.zeros(6, 3, dtype=torch.int64)
    for _ in range(2):
        sums = torch.full((35,), torch.nan)
        found = rows_of(lambda: F.cross_entropy(model(index), torch.arange(6) % 3), 6, sums_D=sums)
        assert not found[:, :20].any()
        assert not sums[:20].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_are_single(dtype: torch.dtype) -> None:
    model, x, y = build("tied", 6)
    expected = one_by_one(model, x, y)
    half = model.to(dtype)
    found = ExampleRows(half)(lambda: F.cross_entropy(half(x), y), 6)
    assert found.dtype == torch.float32
    assert float((6 * found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(
    ("name", "many"), [("tied", 0), *((name, 1 << 27) for name in ("tied", "used twice", "lstm", "normed"))]
)
def test_streams_wait_for_each_other(name: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to a place or to a sum is ordered, and the pass goes on when all of it is done."""
    monkeypatch.setattr(rows, "_MANY", many)
    current = lines_for_streams(monkeypatch)
    latest: dict[int, tuple[Line, int]] = {}  # by place, what happened to it last
    arrivals = [(current[0], 0)]

    def note(touched: Tensor) -> None:
        line, where = current[-1], touched.data_ptr()
        assert line.is_after(arrivals[-1])
        assert line.is_after(latest.get(where, (line, 0)))
        latest[where] = line.does_something()

    def noted(function: Any, place: int) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            note(args[place])
            return function(*args, **kwargs)

        return wrapper

    def added_up(writing: Any, use: Any, key: str, found: Any) -> None:
        note(writing._sums[use.names[key]])
        add_up(writing, use, key, found)

    def gradients_have_come(writing: Any, use: Any) -> None:
        arrivals.append(current[0].does_something())
        take(writing, use)

    take, add_up = _Writing._take, _Writing._add_up
    monkeypatch.setattr(_Writing, "_add_up", added_up)
    monkeypatch.setattr(_Writing, "_take", gradients_have_come)
    monkeypatch.setattr("cdgrab.sources.rows.write_rows", noted(write_rows, 1))
    monkeypatch.setattr(torch, "sum", noted(torch.sum, 0))
    model, x, y = build(name, 6)
    expected = one_by_one(model, x, y)
    rows_of = ExampleRows(model)
    lines: Any = [Line() for _ in range(3)]
    rows_of._streams, rows_of._checked = lines, True
    found = rows_of(lambda: F.cross_entropy(model(x), y), 6)
    torch.testing.assert_close(6 * found, expected)
    assert len(latest) == 2 * len(list(model.parameters()))
    assert {line for line, _ in latest.values()} <= set(lines)
    assert all(current[0].is_after(what) for what in latest.values())


def test_a_wide_loss_of_single_layers() -> None:
    model, x, y = build("mlp", 6, torch.float32)
    expected = one_by_one(model, x, y)
    found = ExampleRows(model)(lambda: F.cross_entropy(model(x).double(), y), 6)
    torch.testing.assert_close(6 * found, expected, rtol=1e-4, atol=1e-6)


def test_norms_without_a_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 2)).double()
    x, y = randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    expected = one_by_one(model, x, y)
    torch.testing.assert_close(5 * ExampleRows(model)(lambda: F.cross_entropy(model(x), y), 5), expected)


class Outside(nn.Module):
    """Uses the weight of a layer without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, 4), nn.Embedding(6, 4)

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.tokens(index) + self.positions(torch.arange(index.shape[1]))
        return F.linear(hidden, self.tokens.weight).mT


@pytest.mark.parametrize(
    ("num", "words"),
    [(2, r"'positions' \(Embedding\) has outputs of shape \(6, 4\), but the batch has 2"), (6, "do not add up")],
)
def test_what_would_be_wrong_is_refused_at_the_first_batch(num: int, words: str) -> None:
    model, index = Outside(), torch.arange(6 * num).view(num, 6) % 5
    with pytest.raises(ValueError, match=words):
        ExampleRows(model)(lambda: F.cross_entropy(model(index), index), num)


def test_what_is_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\) took or gave was changed in place"):
        ExampleRows(model)(lambda: F.cross_entropy(model(randn(4, 3)), torch.arange(4) % 2), 4)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (3, 2)])
def test_patches(
    kernel: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int], stride: tuple[int, int]
) -> None:
    x = randn(2, 3, 8, 9)
    outputs = F.conv2d(x, randn(4, 3, *kernel), None, stride, padding, dilation).shape[2:]
    expected = F.unfold(x, kernel, dilation, padding, stride)
    geometry = Geometry(tuple(outputs), kernel, dilation, padding, stride)
    assert torch.equal(patches(x, geometry), expected)
    assert torch.equal(patches(x.mT.contiguous().mT, geometry), expected)
    part = patches(torch.cat([x, x])[2:], geometry)  # not where its memory begins
    assert torch.equal(part, expected)

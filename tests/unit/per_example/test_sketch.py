"""Sketches: equal to the reference, faithful to inner products, the same for everyone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import MODELS, Catching, build, one_by_one, rows_of, source_of
from cdgrab import Ordering
from cdgrab.balancing.tally import WITNESS_SHARE
from cdgrab.factors import Lookup
from cdgrab.per_example.plan import make_plan
from cdgrab.per_example.sketch import Sketch, checked_length
from cdgrab.per_example.sketch_maps import MOST_FEATURES, TRANSFORM, Paired, Spread
from cdgrab.per_example.sketch_reference import projection
from cdgrab.sources import PerExampleSource, SketchSource


class Convolutions(nn.Module):
    """Strides, padding, dilation, a window of one place, groups; no biases where ResNets have none."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 20, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(20, 14, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2)),
            nn.ReLU(),
            nn.Conv2d(14, 30, 1, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(30, 30, 3, groups=30, padding=1, bias=False),
        )
        self.line, self.out = nn.Conv1d(30, 20, 3, padding=2, dilation=2), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.line(self.convs(x).flatten(2)).mean(2))  # type: ignore[no-any-return]


def built(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    if name != "convolutions":
        return build(name, 6, dtype)
    torch.manual_seed(1)
    return Convolutions().to(dtype), randn(6, 3, 9, 9, dtype=dtype), torch.arange(6) % 5


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("kind", ["paired", "spread"])
@pytest.mark.parametrize("name", [*MODELS, "convolutions"])
def test_they_are_those_of_the_reference(
    name: str, kind: str, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdgrab.per_example.sketch.SPREAD_ENTRIES", 1 if kind == "paired" else 48)
    model, x, y = built(name, dtype)
    shapes, matrices = shapes_of(model), make_plan(model).matrices
    rows = rows_of(model, x, y).double()
    found = rows_of(model, x, y, source="sketch", length=length, seed=3).double()
    expected = rows @ projection(shapes, matrices, length, 3)
    if name not in ("used twice", "unknown", "adapters"):
        assert getattr(Sketch(shapes, matrices, length, 3), kind)  # beside what is folded
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("shape", [(40, 30), (7, 100), (100, 1), (20, 3, 3, 3)], ids=str)
def test_inner_products_are_kept_on_average(shape: tuple[int, ...]) -> None:
    """Within five standard errors over many projections, for gradients of one position, which are alike the most."""
    size = torch.Size(shape)
    rows = (randn(5, shape[0], seed=1)[:, :, None] * randn(5, size.numel() // shape[0], seed=2)[:, None]).flatten(1)
    rows = rows.double()
    tables = []
    for seed in range(300):
        paired = Paired(size, 64, np.random.default_rng(seed))
        short = paired.of_rows(rows)
        tables.append(short @ short.T)
    error = torch.stack(tables).mean(0) - rows @ rows.T
    spread = torch.stack(tables).std(0)
    assert (error.abs() < 5 * spread / 300**0.5 + 1e-9).all()
    lengths = rows.norm(dim=1)
    assert float((spread / (lengths[:, None] * lengths)).max()) < 3.5 / 64**0.5


@pytest.mark.parametrize("shape", [(40, 30), (30, 41), (7, 100), (200, 3), (9, 5)], ids=str)
def test_spread_matrices_keep_inner_products_on_average(shape: tuple[int, int]) -> None:
    """As above, with what spreading gives folded as well."""
    q, p = shape
    b, a = randn(5, q, seed=1).double(), randn(5, p, seed=2).double()
    rows = (b[:, :, None] * a[:, None]).flatten(1)
    tables = []
    for seed in range(300):
        sketch = Sketch({"weight": torch.Size(shape), "more": torch.Size((64,))}, {"weight"}, 64, seed)
        if not sketch.spread:
            return  # too short to be sketched
        sketch.fold("weight", sketch.spread["weight"].of_outer(a, b))
        short = sketch.finish()
        tables.append(short @ short.T)
    error = torch.stack(tables).mean(0) - rows @ rows.T
    deviation = torch.stack(tables).std(0)
    assert (error.abs() < 5 * deviation / 300**0.5 + 1e-9).all()
    lengths = rows.norm(dim=1)
    assert float((deviation / (lengths[:, None] * lengths)).max()) < 3.5 / 64**0.5


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (30, 3), (3, 30), (1, 9)], ids=str)
def test_spread_matrices_come_from_factors_and_from_rows_alike(shape: tuple[int, int]) -> None:
    q, p = shape
    spread = Spread(torch.Size(shape), 16, np.random.default_rng(0))
    a, b = randn(5, p, seed=1), randn(5, q, seed=2)
    torch.testing.assert_close(
        spread.of_outer(a, b), spread.of_rows((b[:, :, None] * a[:, None]).flatten(1)), rtol=1e-5, atol=1e-6
    )
    index, values = torch.arange(15).view(5, 3) % q, randn(5, 3, p, seed=3)
    table = Lookup(index, values, q)
    torch.testing.assert_close(spread.of_lookups(index, values), spread.of_rows(table.rows()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_is_no_longer_than_a_sketch_loses_nothing(name: str) -> None:
    model, x, y = build(name, 6)
    rows = rows_of(model, x, y)
    short = rows_of(model, x, y, source="sketch", length=8192)
    torch.testing.assert_close(short @ short.T, rows @ rows.T)
    sketch = Sketch(shapes_of(model), make_plan(model).matrices, 8192, 0)
    assert (sketch.watched, sketch.paired, sketch.spread) == (0, {}, {})


def test_parts_of_a_batch_are_sketched_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few examples at a time, or rows that are folded before all of them are there."""
    for name in ("transformer", "lenet", "convolutions"):
        model, x, y = built(name)
        expected = rows_of(model, x, y, source="sketch", length=16)
        monkeypatch.setitem(MOST_FEATURES, "cpu", 1)
        monkeypatch.setattr("cdgrab.per_example.sketch_maps._MOST_BUFFERED", 1)
        torch.testing.assert_close(rows_of(model, x, y, source="sketch", length=16), expected)


def test_frozen_parameters_take_no_part() -> None:
    model, x, y = build("mlp", 6)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    rows = rows_of(model, x, y)
    short = rows_of(model, x, y, source="sketch", length=256)
    torch.testing.assert_close(short @ short.T, rows @ rows.T)


def test_a_number_that_is_not_finite_makes_its_row_so() -> None:
    model, x, y = build("lenet", 6)
    x[2] = torch.inf
    short = rows_of(model, x, y, source="sketch", length=16)
    assert short.isfinite().all(1).tolist() == [True, True, False, True, True, True]
    assert short[2].isnan().all()


@pytest.mark.parametrize("sizes", [[9, 3], [40, 100]], ids=["exact", "rotated"])
def test_one_number_that_is_not_finite_is_enough(sizes: list[int]) -> None:
    sketch = Sketch({str(i): torch.Size((size,)) for i, size in enumerate(sizes)}, (), 16, 0)
    rows = [randn(3, size, seed=size) for size in sizes]
    rows[1][2, 1] = torch.inf
    for i, part in enumerate(rows):
        sketch.add_rows(str(i), part)
    assert sketch.finish().isfinite().sum(1).tolist() == [16, 16, 0]


@pytest.mark.parametrize("shape", [(64,), (40, 30), (100, 60)], ids=["folded", "spread", "paired"])
def test_parameters_of_one_shape_do_not_fall_onto_each_other(shape: tuple[int, ...]) -> None:
    """Two examples with the same gradient, each in another parameter: their inner product is zero on average."""
    shapes, row, products = dict.fromkeys(("one", "other"), torch.Size(shape)), randn(math.prod(shape)), []
    for seed in range(100):
        sketch = Sketch(shapes, set(shapes) if len(shape) > 1 else (), 64, seed)
        sketch.add_rows("one", torch.stack([row, 0 * row]))
        sketch.add_rows("other", torch.stack([0 * row, row]))
        one, other = sketch.finish()
        products.append(float(one @ other / (one.norm() * other.norm())))
    assert abs(np.mean(products)) < 5 * np.std(products) / 10


def test_the_seed_is_that_of_the_ordering() -> None:
    model, x, y = build("mlp", 6)
    one, same, other = (rows_of(model, x, y, source="sketch", length=16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("length", [0, 8, 100, 513])
def test_lengths(length: int) -> None:
    with pytest.raises(ValueError, match=f"length is {length}; choose a power of two, 16 or more"):
        checked_length(length)


@pytest.mark.parametrize("length", [1024.5, "64", True])
def test_lengths_are_whole_numbers(length: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="length"):
        checked_length(length)


def epochs(ordering: Ordering, model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
    for _ in range(count * -(-len(x) // ordering.batch_size)):
        batch = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
        cross_entropy(model(x[batch]), y[batch]).backward()


def test_imbalance_is_that_of_whole_rows() -> None:
    """Witnesses say how far whole gradients are out of balance; the numbers that decide would say too little."""

    def imbalance(source: str, **how: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10)).double()
        ordering = Ordering(512, batch_size=16, unit_size=1, lanes=16, seed=how.pop("seed", 0))
        ordering.attach(model, source=source, **how)
        x, y = randn(512, 40, dtype=torch.float64), torch.arange(512) % 10
        epochs(ordering, model, x, y, 1)
        return ordering.metrics()["imbalance"]

    exact = imbalance("per_example")
    seen = [imbalance("sketch", length=512, seed=seed) for seed in range(5)]
    assert sum(seen) / 5 > 0.9 * exact  # a sketch balances no better than whole rows
    assert sum(seen) / 5 < 1.5 * exact


def test_witnesses_take_no_part_in_decisions() -> None:
    model, x, y = build("transformer", 24)

    def order(scale: float) -> list[int]:
        ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=1)
        witnesses = 64 // WITNESS_SHARE

        def scaled(rows: Tensor) -> Tensor:
            rows[:, -witnesses:] *= scale
            return rows

        ordering.attach(model, source=Catching(SketchSource(length=64), scaled))
        epochs(ordering, model, x, y, 1)
        ordering.detach()
        return ordering.order.tolist()

    assert order(1.0) == order(100.0)


def test_states_say_how_long_sketches_are() -> None:
    model, x, y = build("transformer", 8)

    def attached(length: int) -> Ordering:
        ordering = Ordering(8, batch_size=2, unit_size=1, seed=1)
        ordering.attach(model, source="sketch", length=length)
        return ordering

    ordering = attached(32)
    cross_entropy(model(x[:2]), y[:2]).backward()
    state = ordering.state_dict()
    ordering.detach()
    other = attached(64)
    with pytest.raises(ValueError, match=r"sketches of 32 numbers of one .* has them as sketches of 64"):
        other.load_state_dict(state)
    other.detach()
    whole = Ordering(8, batch_size=2, unit_size=1, seed=1)
    with pytest.raises(ValueError, match="sketches of 32 numbers of one process, and this ordering has them as rows"):
        whole.load_state_dict(state)


def test_between_epochs_a_state_moves_to_another_source() -> None:
    model, x, y = build("mlp", 8)
    first = Ordering(8, batch_size=2, unit_size=1, seed=1)
    first.attach(model, source="sketch", length=16)
    epochs(first, model, x, y, 1)
    state = first.state_dict()
    first.detach()
    second = Ordering(8, batch_size=2, unit_size=1, seed=1)
    second.attach(model, source="per_example")
    second.load_state_dict(state)
    assert second.order.tolist() == first.order.tolist()
    epochs(second, model, x, y, 1)
    assert second.epoch == 2


def test_after_detaching_rows_are_whole_again() -> None:
    model, x, y = build("mlp", 8)
    ordering = Ordering(8, batch_size=2, unit_size=1, seed=1)
    ordering.attach(model, source="sketch", length=16)
    epochs(ordering, model, x, y, 1)
    ordering.detach()
    ordering.observe(randn(2, 3))
    assert ordering.examples_left == 6


def test_a_state_moves_to_a_model_attached_within_an_epoch() -> None:
    """Detached and attached again with the same sketches, an epoch goes on."""
    model, x, y = build("mlp", 8)
    ordering = Ordering(8, batch_size=2, unit_size=1, seed=1)
    ordering.attach(model, source="sketch", length=16)
    cross_entropy(model(x[:2]), y[:2]).backward()
    ordering.detach()
    ordering.attach(model, source="sketch", length=16)
    cross_entropy(model(x[:2]), y[:2]).backward()
    assert ordering.examples_left == 4


def test_the_plan() -> None:
    layers = nn.Conv2d(3, 120, 3), nn.Flatten(), nn.Linear(480, 50), nn.Linear(50, 8), nn.Linear(8, 2)
    net = nn.Sequential(*layers)
    net[4].requires_grad_(False)
    ordering = Ordering(4, batch_size=2, unit_size=1)
    header, conv, linear, last, *notes = ordering.explain(net, torch.zeros(2, 3, 4, 4), length=64).splitlines()
    assert header.split() == ["layer", "type", "parameters", "positions", "extra", "sketch"]
    # Four positions with features of five transforms each, and a bias of 120 that is formed and folded.
    transform = TRANSFORM * 64
    assert conv.split()[:4] == ["0", "Conv2d", "3,360", "4"]
    assert conv.split()[4:] == [f"{(4 * 5 * transform + 240) / (3 * 4 * 3360):.2f}x", "paired", "and", "folded"]
    assert linear.split()[:5] == ["2", "Linear", "24,050", "1", f"{(2 * transform + 100) / (3 * 24050):.2f}x"]
    assert last.split()[4:] == [f"{(400 + 16) / (3 * 408):.2f}x", "spread", "and", "folded"]
    assert "becomes a sketch of 64 numbers" in notes[0]
    assert "nothing is lost" in ordering.explain(nn.Linear(3, 3))
    assert "runs once more" in ordering.explain(nn.LSTM(4, 5, batch_first=True), torch.zeros(2, 3, 4))
    assert "give a batch" in ordering.explain(nn.Linear(3, 3))


def test_every_coordinate_takes_part_in_decisions() -> None:
    """Also those of small parameters, which are folded: witnesses take an eighth of each, and all of none."""
    shapes = {"weight": torch.Size((40, 30)), "bias": torch.Size((40,)), "norm": torch.Size((30,))}
    sketch = Sketch(shapes, {"weight"}, 64, 0)
    deciding = projection(shapes, {"weight"}, 64, 0)[:, : -sketch.watched]
    torch.testing.assert_close(deciding[1200:].square().sum(1), torch.full((70,), 7 / 8, dtype=torch.float64))


@pytest.mark.parametrize("source", ["per_example", "sketch"])
@pytest.mark.parametrize("name", MODELS)
def test_examples_of_a_short_batch_weigh_as_much_as_others(name: str, source: str) -> None:
    """The mean over four examples gives each of them more weight than the mean over six."""
    model, x, y = build(name, 10)
    ordering = Ordering(10, batch_size=6, unit_size=1, order="rr")
    catching = Catching(source_of(source, 64), lambda rows: rows)
    ordering.attach(model, source=catching)
    cross_entropy(model(x[:6]), y[:6]).backward()
    cross_entropy(model(x[2:6]), y[2:6]).backward()
    torch.testing.assert_close(catching.rows[1], catching.rows[0][2:])


def test_examples_of_a_short_batch_are_as_long_in_a_sum() -> None:
    model, x, y = build("mlp", 10)
    ordering = Ordering(10, batch_size=6, unit_size=1, order="rr")
    catching = Catching(PerExampleSource(reduction="sum"), lambda rows: rows)
    ordering.attach(model, source=catching)
    for batch in (slice(0, 6), slice(2, 6)):
        cross_entropy(model(x[batch]), y[batch], reduction="sum").backward()
    ordering.detach()
    torch.testing.assert_close(catching.rows[1], one_by_one(model, x[2:6], y[2:6]))


def test_a_model_may_change_its_type() -> None:
    model, _, _ = build("tied", 6)
    table = Paired(shapes_of(model)["tokens.weight"], 16, np.random.default_rng(0)).outputs
    for dtype in (torch.float64, torch.float32):
        units = table.of_units(torch.arange(11), torch.zeros(1, dtype=dtype))
        assert units.dtype == dtype.to_complex()


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("name", ["transformer", "convolutions", "attention", "lstm"])
def test_both_ways_to_the_sketch_of_a_matrix(name: str, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From features of all positions, and from gradients that are formed."""
    model, x, y = built(name)
    monkeypatch.setattr("cdgrab.per_example.sketch.SPREAD_ENTRIES", 1)
    expected = rows_of(model, x, y, source="sketch", length=16)
    monkeypatch.setattr(Paired, "prefers_rows", lambda *_: rows)
    torch.testing.assert_close(rows_of(model, x, y, source="sketch", length=16), expected)


def test_many_positions_are_sketched_from_rows() -> None:
    paired = Paired(torch.Size((64, 64)), 1024, np.random.default_rng(0))
    assert not paired.prefers_rows(1, 2)
    assert not paired.prefers_rows(16, 2)
    assert paired.prefers_rows(1024, 2)
    wide = Paired(torch.Size((4096, 4096)), 1024, np.random.default_rng(0))
    assert not wide.prefers_rows(4096, 2)


@pytest.mark.parametrize(("order", "rule"), [("cd-grab", "walk"), ("pair", "halving"), ("grab", "greedy")])
def test_attaching_again_between_epochs_changes_nothing(order: str, rule: str) -> None:
    def orders(again: bool) -> list[list[int]]:
        model, x, y = build("mlp", 24)
        ordering = Ordering(24, batch_size=4, unit_size=1, order=order, rule=rule, seed=1)
        ordering.attach(model, source="sketch", length=32)
        found = []
        for _ in range(4):
            epochs(ordering, model, x, y, 1)
            found.append(ordering.order.tolist())
            if again:
                ordering.detach()
                ordering.attach(model, source="sketch", length=32)
        return found

    assert orders(again=True) == orders(again=False)


def test_draws_go_on_with_another_source() -> None:
    def draw(source: str) -> Any:
        model, x, y = build("mlp", 24)
        ordering = Ordering(24, batch_size=4, unit_size=1, rule="walk", seed=1)
        ordering.attach(model, source="per_example")
        epochs(ordering, model, x, y, 1)
        ordering.detach()
        ordering.attach(model, source=source_of(source, 32))
        sorter: Any = ordering._epochs.intake.sorter
        return sorter.rules[0].state_dict()

    assert str(draw("sketch")) == str(draw("per_example"))


def test_rows_of_an_epoch_are_of_one_form() -> None:
    model, x, y = build("mlp", 8)
    ordering = Ordering(8, batch_size=2, unit_size=1, seed=1)
    ordering.attach(model, source="sketch", length=16)
    cross_entropy(model(x[:2]), y[:2]).backward()
    ordering.detach()
    others: list[Any] = [
        lambda: ordering.attach(model, source="per_example"),
        lambda: ordering.attach(model, source="sketch", length=32),
        lambda: ordering.observe(randn(2, 16)),
    ]
    for other in others:
        with pytest.raises(ValueError, match="2 rows of this epoch have been observed already, as sketches of 16"):
            other()
    ordering.set_epoch(1)
    ordering.observe(randn(2, 3))
    assert ordering.examples_left == 6


def test_gradients_that_are_too_long_are_left_out_everywhere() -> None:
    model, x, y = build("transformer", 8, torch.float32)

    def figures(*scales: float) -> dict[str, float]:
        ordering = Ordering(8 * len(scales), batch_size=8, unit_size=1, lanes=1, seed=1)
        ordering.attach(model, source="sketch", length=16)
        for scale in scales:
            (scale * cross_entropy(model(x), y)).backward()
        ordering.detach()
        return ordering.metrics()

    found = figures(1.0, 1e24)
    assert found["nonfinite"] == 4
    assert found["imbalance"] == pytest.approx(figures(1.0)["imbalance"])


def test_passes_that_differ_without_end_keep_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdgrab.per_example.sketch_maps._MOST_PADDED", 200)
    names = [f"bias {i}" for i in range(6)]
    sketch = Sketch({name: torch.Size((10,)) for name in names}, set(), 16, 0)
    for number in range(1, 64):
        for i, name in enumerate(names):
            if number >> i & 1:
                sketch.add_rows(name, randn(3, 10))
        sketch.finish()
    assert sum(map(len, sketch.folding._padded.values())) <= 200 + 6 * 32


def test_the_plan_draws_nothing() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout())
    before = torch.random.get_rng_state()
    Ordering(4, batch_size=2, unit_size=1).explain(net, torch.zeros(2, 6))
    assert torch.equal(torch.random.get_rng_state(), before)

"""Short rows: what they keep of inner products, and that they are the same for everyone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from _models import MODELS, build, recorded
from cdgrab import Ordering, World
from cdgrab.ghost.convolved import Convolved
from cdgrab.ghost.layers import convolution
from cdgrab.ghost.records import written_out
from cdgrab.ghost.sketch import Sketcher
from cdgrab.hooks.ghost import ExampleAttachment


@pytest.mark.parametrize("name", MODELS)
def test_a_sketch_as_long_as_the_gradient_is_the_gradient(name: str) -> None:
    model, x, y = build(name, 5)
    records, shapes = recorded(model, x, y)
    rows = Sketcher(shapes, 10**7, fitted=True)(records, 0)
    torch.testing.assert_close(rows, written_out(records, shapes))


@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer"])
def test_random_projections_keep_inner_products_on_average(name: str) -> None:
    model, x, y = build(name, 5)
    records, shapes = recorded(model, x, y)
    rows = written_out(records, shapes)
    tables = []
    for seed in range(150):
        short = Sketcher(shapes, 60, fitted=False, seed=seed)(records, 0)
        assert short.shape[1] < 90
        tables.append(short @ short.T)
    spread = torch.stack(tables).std(0) / 150**0.5
    assert ((torch.stack(tables).mean(0) - rows @ rows.T).abs() < 5 * spread + 1e-9).all()


def test_fitted_directions_keep_more_of_data_of_low_rank() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30).double()
    directions = torch.randn(3, 40, dtype=torch.float64)
    x, y = torch.randn(16, 3, dtype=torch.float64) @ directions, torch.arange(16) % 3
    records, shapes = recorded(model, x, y)
    rows = written_out(records, shapes)
    error = {}
    for fitted in (True, False):
        sketcher = Sketcher(shapes, 60, fitted=fitted)
        sketcher(records, 0)
        short = sketcher(records, 1)
        error[fitted] = float((short @ short.T - rows @ rows.T).norm() / (rows @ rows.T).norm())
    assert error[True] < 0.05 < 0.2 < error[False]


def test_a_parameter_without_a_gradient_leaves_a_gap() -> None:
    model, x, y = build("mlp", 4)
    records, shapes = recorded(model, x, y)
    sketcher = Sketcher(shapes, 50, fitted=False)
    whole = sketcher(records, 0)
    part = sketcher({key: record for key, record in records.items() if key != "0.weight"}, 0)
    assert part.shape == whole.shape
    assert 0 < int((part != whole).any(0).sum()) < whole.shape[1]


def test_resume() -> None:
    def fresh() -> tuple[nn.Module, Ordering]:
        model, _, _ = build("mlp", 1)
        ordering = Ordering(24, batch_size=4, unit_size=1, world=World.simulated(2), seed=1)
        ordering.attach(model, source="sketch", length=40)
        return model, ordering

    _, x, y = build("mlp", 24)

    def step(model: nn.Module, ordering: Ordering) -> None:
        batch = torch.from_numpy(ordering.remaining()[:4])
        cross_entropy(model(x[batch]), y[batch]).backward()

    for steps in (3, 8):  # while directions are gathered, and when they are in use
        model, straight = fresh()
        for _ in range(steps):
            step(model, straight)
        other, resumed = fresh()
        resumed.load_state_dict(straight.state_dict())
        for _ in range(16):
            step(model, straight)
            step(other, resumed)
        np.testing.assert_array_equal(straight.order, resumed.order)
        with pytest.raises(ValueError, match="source='sketch'"):
            Ordering(24, batch_size=4, unit_size=1, world=World.simulated(2), seed=1).load_state_dict(
                straight.state_dict()
            )


def test_a_sketch_of_nothing() -> None:
    with pytest.raises(ValueError, match="length is 0; a sketch has at least one number"):
        Ordering(8, batch_size=4, unit_size=1).attach(nn.Linear(2, 2), source="sketch", length=0)


@pytest.mark.parametrize("fitted", [True, False])
def test_sequences_of_any_length(fitted: bool) -> None:
    """Short ones leave factors, long ones rows; the sketch is the same projection of either."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).double()
    sketcher = None
    for positions in (40, 3, 40):
        x = torch.randn(4, positions, 16, dtype=torch.float64)
        ordering = Ordering(4, batch_size=4, unit_size=1, order="rr")
        caught: list[Any] = []
        attachment = ExampleAttachment(ordering, model, lambda *found, kept=caught: kept.append(found), mean=True)
        model(x).square().mean().backward()
        attachment.detach()
        [(found, shapes)] = caught
        records = found.records()
        sketcher = sketcher or Sketcher(shapes, 36, fitted=fitted)
        rows = sketcher(records, 0)
        b, a = (sketcher._projections["weight", side] for side in "ba")
        expected = b @ written_out(records, shapes).view(4, 16, 16) @ a.T
        torch.testing.assert_close(rows, expected.flatten(1))


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_records_are_shortened_as_they_come(name: str, fitted: bool) -> None:
    """The first pass is kept whole, to be checked; later ones are shortened layer by layer. The rows are the same."""
    model, x, y = build(name, 6)
    ordering = Ordering(18, batch_size=6, unit_size=1, order="rr")
    ordering.attach(model, source="sketch", length=60, fitted=fitted)
    attachment: Any = ordering._attachment
    found: list[torch.Tensor] = []
    attachment.consume = lambda turn, shapes: found.append(attachment.sketcher(turn.records(), 0))
    for _ in range(3):
        loss = cross_entropy(model(x), y)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, trained, retain_graph=True)  # counts as no batch, and leaves nothing
        loss.backward()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])

    ordering.detach()
    records, shapes = recorded(model, x, y)
    other = Sketcher(shapes, 60, fitted=fitted)
    expected = other({key: record.scaled(1 / 6) for key, record in records.items()}, 0)
    torch.testing.assert_close(found[0], expected)
    if name in ("mlp", "lenet"):  # three passes have been gathered, and nothing of what was only asked for
        assert bool(other._moments) == fitted
        for side, moment in other._moments.items():
            torch.testing.assert_close(attachment.sketcher._moments[side], 3 * moment)


def test_a_convolution_is_projected_without_its_rows() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)).double()
    x = torch.randn(5, 3, 9, 10, dtype=torch.float64)
    grad = torch.randn_like(model(x))
    record: Any = convolution(model, x, grad, 5)["weight"]
    rows = torch.stack([torch.autograd.grad(model(x[i : i + 1]), model.weight, grad[i : i + 1])[0] for i in range(5)])
    torch.testing.assert_close(record.rows(), rows.flatten(1))
    for length in (8, 30, 60):
        sketcher = Sketcher({"weight": model.weight.shape}, length, fitted=False)
        with mock.patch.object(Convolved, "compact", side_effect=AssertionError("rows were written")):
            short = sketcher({"weight": record}, 0)
        b, a = (sketcher._projections.get(("weight", side), torch.eye(8).double()) for side in "ba")
        torch.testing.assert_close(short, (b @ rows.flatten(2) @ a.T).flatten(1))

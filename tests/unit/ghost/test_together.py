"""Short rows of small parameters, shortened together by compiled code: what PyTorch makes of them one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from _inputs import randn
from _models import MODELS, build, recorded
from cdgrab import Ordering, World
from cdgrab.ghost import together
from cdgrab.ghost.records import Matrix, Record, Rows, Summed
from cdgrab.ghost.sketch import Sketcher

pytest.importorskip("numba")


def both_ways(
    records: dict[str, Record], shapes: dict[str, torch.Size], length: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, int]:
    """Rows made together, rows made one by one, and how many parameters the first had in common."""
    used: list[int] = []
    add_short_rows = together.add_short_rows

    def noted(parts: list[together.Part], rows_ND: Tensor) -> None:
        used.append(len(parts))
        add_short_rows(parts, rows_ND)

    with monkeypatch.context() as patch:
        patch.setattr("cdgrab.ghost.sketch.add_short_rows", noted)
        found = Sketcher(shapes, length, fitted=False)(records, 0)
        patch.setattr(together, "MOST_MULTIPLICATIONS", -1)
        expected = Sketcher(shapes, length, fitted=False)(records, 0)
    assert len(used) <= 1
    return found, expected, sum(used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [20, 150, 10**7])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_models(name: str, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build(name, 5, dtype)
    found, expected, _ = both_ways(*recorded(model, x, y), length, monkeypatch)
    assert found.dtype == expected.dtype == dtype
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (1e-10, 1e-13)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol * float(expected.abs().max()) + atol)


@pytest.mark.parametrize(("q", "p"), [(1, 1), (1, 33), (7, 5), (40, 3), (3, 40)])
@pytest.mark.parametrize("length", [1, 6, 50, 1000])
def test_every_form(q: int, p: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors, rows and sums; of a layer that is used twice; in memory of any order, and not finite."""
    first, second = (Matrix(randn(6, 1, p, seed=s), randn(q, 1, 6, seed=s + 1).transpose(0, 2)) for s in (0, 2))
    rows = randn(6, q * p, seed=4)
    rows[2, 0], first.a_NTp[4, 0, 0] = torch.nan, torch.inf
    shapes = {"one": torch.Size((q, p)), "bias": torch.Size((q,)), "other": torch.Size((q, p, 1))}
    records: dict[str, Record] = {"one": first, "bias": Summed(randn(6, 1, q, seed=6)), "other": Rows(rows)}
    found, expected, count = both_ways(records, shapes, length, monkeypatch)
    assert count == 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    sketcher = Sketcher(shapes, length, fitted=False)
    sketcher.take("one", first, 0)
    torch.testing.assert_close(
        sketcher({"one": second}, 0),
        sketcher({"one": first}, 0) + sketcher({"one": second}, 0),
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )


def test_what_is_large_or_has_positions_is_not_taken() -> None:
    sizes = (400, 300, 20, 20)
    assert together.takes(randn(32, 400), randn(32, 300), sizes)
    assert not together.takes(randn(500, 400), randn(500, 300), sizes)
    assert not together.takes(randn(32, 400).half(), randn(32, 300).half(), sizes)
    assert not together.takes(randn(32, 400), randn(32, 300).double(), sizes)
    assert together.factors_of(Matrix(randn(4, 2, 3), randn(4, 2, 3))) is None
    assert together.factors_of(Summed(randn(4, 2, 3))) is None


def test_a_pass_that_breaks_off_leaves_nothing() -> None:
    model, x, y = build("mlp", 12)
    ordering = Ordering(12, batch_size=4, unit_size=1, world=World.simulated(2))
    ordering.attach(model, source="sketch", length=30, fitted=False)
    attachment = ordering._attachment
    torch.nn.functional.cross_entropy(model(x[:4]), y[:4]).backward()
    sketcher = attachment.sketcher  # type: ignore[union-attr]
    records, _ = recorded(model, x[:4], y[:4])
    expected = Sketcher(sketcher._shapes, 30, fitted=False)(records, 0)
    sketcher.take(next(iter(records)), next(iter(records.values())), 0)
    assert sketcher._small
    sketcher.drop()
    torch.testing.assert_close(sketcher(records, 0), expected)


def test_only_so_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build("mlp", 5)
    records, shapes = recorded(model, x, y)
    whole, _, many = both_ways(records, shapes, 40, monkeypatch)
    monkeypatch.setattr("cdgrab.ghost.sketch._MOST_WAITING", 150)
    found, _, few = both_ways(records, shapes, 40, monkeypatch)
    assert 0 < few < many
    torch.testing.assert_close(found, whole)


def test_rows_of_several_types_are_of_the_widest(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"one": torch.Size((4,)), "other": torch.Size((4,))}
    records: dict[str, Record] = {"one": Rows(randn(3, 4)), "other": Rows(randn(3, 4, seed=1).double())}
    found, expected, _ = both_ways(records, shapes, 4, monkeypatch)
    assert found.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(found, expected)


def test_a_gradient_that_is_changed_in_place_is_refused() -> None:
    layer, last = torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)
    ordering = Ordering(12, batch_size=4, unit_size=1)
    ordering.attach(torch.nn.ModuleList([layer, last]), source="sketch", length=30, fitted=False)
    x, y = randn(4, 5), torch.arange(4) % 3
    torch.nn.functional.cross_entropy(last(layer(x)), y).backward()
    hidden = layer(x)
    hidden.register_hook(_shrink)
    with pytest.raises(ValueError, match=r"what the layer of '0\.\w+' took or gave was changed in place"):
        torch.nn.functional.cross_entropy(last(hidden), y).backward()


def _shrink(grad: Tensor) -> None:
    grad.mul_(0.1)


def test_another_parameter_in_the_place_of_one_is_not_read_beyond_its_end() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.ReLU(), torch.nn.Linear(64, 40))
    ordering = Ordering(12, batch_size=4, unit_size=1)
    ordering.attach(model, source="sketch", length=50, fitted=False)
    x, y = randn(4, 5), torch.arange(4) % 2
    torch.nn.functional.cross_entropy(model(x), y).backward()
    model[2].weight, model[2].bias = torch.nn.Parameter(randn(2, 64)), torch.nn.Parameter(randn(2))
    with pytest.raises(RuntimeError, match="shape"):
        torch.nn.functional.cross_entropy(model(x), y).backward()

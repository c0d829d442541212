"""Pairs of small layers, balanced by compiled code: what tables give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import build, recorded, summed
from cdgrab import Ordering, World
from cdgrab.balance.rules import FloatArray, Greedy
from cdgrab.balance.tables import decide
from cdgrab.ghost import compiled
from cdgrab.ghost.pairs import Pairs, difference
from cdgrab.ghost.passes import Batch
from cdgrab.ghost.records import Matrix, Rows, subtracted

pytest.importorskip("numba")


def two_turns(name: str, dtype: torch.dtype) -> tuple[Batch, dict[str, torch.Size]]:
    model, x, y = build(name, 14, dtype)
    first, shapes = recorded(model, x[:7], y[:7])
    second, _ = recorded(model, x[7:], y[7:])
    return difference(first, second), shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mlp", "lenet", "adapters"])
def test_signs_and_running_sum(name: str, dtype: torch.dtype) -> None:
    pairs, shapes = two_turns(name, dtype)
    sums = {key: 0.1 * randn(*shapes[key], seed=3).to(dtype) for key in pairs}
    there = {key: part.double().clone() for key, part in sums.items()}
    exact = {key: record.like(tuple(t.double() for t in record.tensors)) for key, record in pairs.items()}
    work = Pairs(exact, summed(there))
    expected = decide(work.table(0), Greedy())
    work.add(0, expected[1])
    assert all(compiled._is_known(record, dtype) for record in pairs.values())
    found = torch.from_numpy(compiled.pair_signs(pairs, sums))
    assert expected[2].abs().min() > 1e-4 * expected[2].abs().max()  # none is decided by rounding
    torch.testing.assert_close(found[:2], expected[:2])
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-9, 1e-12)
    torch.testing.assert_close(found[2:], expected[2:], rtol=rtol, atol=atol)
    for key, part in sums.items():
        torch.testing.assert_close(part.double(), there[key], rtol=rtol, atol=atol)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_pair_that_is_not_finite_is_left_out(bad: float) -> None:
    a, b, rows = randn(5, 1, 6), randn(5, 1, 3, seed=1), randn(5, 4, seed=2)
    pairs = {"weight": subtracted(Matrix(a, b), Matrix(a.flip(0), b)), "bias": Rows(rows.clone())}
    without = {key: record.like(tuple(t[[0, 1, 3, 4]] for t in record.tensors)) for key, record in pairs.items()}
    a[2, 0, 1] = bad
    sums = [{"weight": torch.zeros(3, 6), "bias": torch.zeros(4)} for _ in range(2)]
    found, expected = compiled.pair_signs(pairs, sums[0]), compiled.pair_signs(without, sums[1])
    np.testing.assert_array_equal(found[:, [0, 1, 3, 4]], expected)
    np.testing.assert_array_equal(found[:, 2], [1, 0, 0, 0])
    assert all(torch.equal(sums[0][key], sums[1][key]) for key in pairs)


@pytest.mark.parametrize("name", ["mlp", "adapters", "lenet"])
@pytest.mark.parametrize(("workers", "batch"), [(3, 3), (4, 8), (1, 5)])
def test_orders(name: str, workers: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def orders(loop: bool) -> list[list[int]]:
        monkeypatch.setattr(compiled, "_saved", lambda record: 1 if loop else -1)
        used: list[int] = []
        pair_signs = compiled.pair_signs

        def noted(pairs: Batch, running_sum: dict[str, torch.Tensor]) -> FloatArray:
            used.append(len(pairs))
            return pair_signs(pairs, running_sum)

        monkeypatch.setattr(compiled, "pair_signs", noted)
        model, x, y = build(name, 5 * batch + 2)
        ordering = Ordering(len(x), batch_size=batch, unit_size=1, world=World.simulated(workers), seed=1)
        ordering.attach(model, source="ghost")
        found = []
        while ordering.epoch < 3:
            index = torch.from_numpy(ordering.remaining()[:batch])
            cross_entropy(model(x[index]), y[index]).backward()
            found.append(ordering.order.tolist())
        assert bool(used) == loop
        monkeypatch.undo()
        return found

    assert orders(True) == orders(False)


def adapters(num: int, width: int = 1024) -> tuple[Batch, dict[str, torch.Tensor]]:
    a, b = torch.zeros(num, 1, width), torch.zeros(num, 1, 8)
    pair = subtracted(Matrix(a, b), Matrix(a, b))
    return {str(i): pair for i in range(8)}, {str(i): torch.zeros(8, width) for i in range(8)}


def test_where_it_is_faster() -> None:
    assert compiled.takes(*adapters(32))
    assert compiled.takes(*adapters(128))
    assert not compiled.takes(*adapters(32, width=1 << 12))  # does not stay in cache
    a, b = torch.zeros(128, 1, 400), torch.zeros(128, 1, 120)
    large = subtracted(Matrix(a, b), Matrix(a, b))
    assert not compiled.takes({"fc": large}, {"fc": torch.zeros(120, 400)})  # the table takes little
    positions = subtracted(Matrix(torch.zeros(4, 2, 5), torch.zeros(4, 2, 3)), Matrix(a[:4], b[:4]))
    assert not compiled.takes({"w": positions}, {"w": torch.zeros(3, 5)})


def test_rules_that_draw_take_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(compiled, "pair_signs", refuse)
    model = nn.Linear(3, 2)
    ordering = Ordering(12, batch_size=3, unit_size=1, world=World.simulated(3), rule="walk")
    ordering.attach(model, source="ghost")
    for x in randn(12, 3).split(3):
        model(x).square().mean().backward()
    assert ordering.epoch == 1


def test_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ordering = Ordering(64, batch_size=32, unit_size=1, world=World.simulated(32))
    small = nn.Sequential(nn.Linear(1024, 8, bias=False), nn.Linear(8, 1024, bias=False))
    assert "one by one" in ordering.explain(small, torch.zeros(32, 1024))
    assert "one by one" not in ordering.explain(small, torch.zeros(32, 5, 1024))  # positions
    assert "one by one" not in ordering.explain(nn.Linear(400, 120), torch.zeros(32, 400))
    assert "one by one" not in ordering.explain(nn.Linear(1024, 256), torch.zeros(32, 1024))
    monkeypatch.setattr("cdgrab.ghost.plan.available", lambda: False)
    assert "one by one" not in ordering.explain(small, torch.zeros(32, 1024))

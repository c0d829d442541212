"""Records of a backward pass against the gradients of every example alone, the slow and obvious way."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import MODELS, build, one_by_one, recorded
from cdgrab import Ordering, World, flat_grad
from cdgrab.balance.rules import Greedy
from cdgrab.ghost import Matrix
from cdgrab.ghost.pairs import Batch, Pairs, ReplayedPairs, _copied, _signature, difference, table
from cdgrab.ghost.records import Pair, written_out
from cdgrab.ghost.sorter import GhostPairs

DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_rows(name: str, dtype: torch.dtype) -> None:
    model, x, y = build(name, 6, dtype)
    expected = one_by_one(model, x, y)
    found = written_out(*recorded(model, x, y))
    torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)
    plain = flat_grad(model)  # and the backward pass itself was not disturbed
    torch.testing.assert_close(plain, expected.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_sum_losses(name: str) -> None:
    model, x, y = build(name, 4)
    rows = written_out(*recorded(model, x, y, reduction="sum"))
    scale = y[0].numel()  # the loss of an example alone is the mean over its own tokens
    torch.testing.assert_close(rows, scale * one_by_one(model, x, y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_tables_and_running_sums(name: str, dtype: torch.dtype) -> None:
    """Of differences, as they are balanced: inner products, and what is added to the running sum."""
    model, x, y = build(name, 12, dtype)
    (first, shapes), (second, _) = recorded(model, x[:6], y[:6]), recorded(model, x[6:], y[6:])
    rows = one_by_one(model, x, y)
    differences = (rows[:6] - rows[6:]).double()
    running_sum = {key: randn(*shape, seed=3, dtype=dtype) for key, shape in shapes.items()}
    flat = torch.cat([part.flatten() for part in running_sum.values()]).double()
    expected = torch.cat([differences @ differences.T, (differences @ flat)[:, None]], dim=1)
    pairs = difference(first, second)
    rtol, atol = (1e-9, 1e-9) if dtype == torch.float64 else (1e-3, 1e-4)
    torch.testing.assert_close(table(pairs, running_sum), expected, rtol=rtol, atol=atol)
    weights = torch.tensor([1.0, -1, 0, 1, -1, -1], dtype=dtype)
    for key, record in pairs.items():
        record.add_to(running_sum[key], weights)
    moved = torch.cat([part.flatten() for part in running_sum.values()]).double()
    torch.testing.assert_close(moved, flat + weights.double() @ differences, rtol=rtol, atol=atol)


@pytest.mark.parametrize("positions", [1, 2, 9, 40])
def test_both_ways_to_inner_products(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        Matrix(
            randn(5, count, 7, seed=count, dtype=torch.float64),
            randn(5, count, 11, seed=count + 1, dtype=torch.float64),
        )
        for count in (positions, positions + 2)  # sequences of unequal length
    )
    r = randn(11, 7, dtype=torch.float64)
    rows = (first.b_NTq.mT @ first.a_NTp - second.b_NTq.mT @ second.a_NTp).flatten(1)
    expected = torch.cat([rows @ rows.T, (rows @ r.flatten())[:, None]], dim=1)
    for factors, most in [(True, 1 << 20), (False, 1 << 20), (False, 100)]:  # the last: some outputs at a time
        monkeypatch.setattr(Pair, "prefers_factors", lambda _, factors=factors: factors)
        monkeypatch.setattr("cdgrab.ghost.records.MOST_NUMBERS", most)
        gram, dots = Pair(first, second).products(r)
        torch.testing.assert_close(torch.cat([gram, dots[:, None]], dim=1), expected)


@pytest.mark.parametrize(("workers", "per_step"), [(1, 4), (4, 4), (3, 6), (2, 6)])
@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer", "tied"])
def test_orders_are_those_of_rows(name: str, workers: int, per_step: int) -> None:
    """Two epochs of training, one ordering fed with records, one with rows; also where the last batch is short."""
    orders = []
    for source in ("ghost", "rows"):
        model, x, y = build(name, 26)
        ordering = Ordering(26, batch_size=per_step, unit_size=1, world=World.simulated(workers), seed=3)
        if source == "ghost":
            ordering.attach(model, source="ghost")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[:per_step])
            rows = one_by_one(model, x[batch], y[batch]) if source == "rows" else None
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            if rows is not None:
                ordering.observe(rows)
            optimizer.step()
        orders.append([order.tolist() for order in ordering.orders])
        assert ordering.metrics()["seconds"] > 0
    assert orders[0] == orders[1]


def test_pairs_that_cannot_be_recorded_are_balanced_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    def orders() -> list[list[int]]:
        model, x, y = build("mlp", 24)
        ordering = Ordering(24, batch_size=3, unit_size=1, world=World.simulated(3), seed=3)
        ordering.attach(model, source="ghost")
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[:3])
            cross_entropy(model(x[batch]), y[batch]).backward()
        return [order.tolist() for order in ordering.orders]

    expected = orders()
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", refuse)
    assert orders() == expected
    assert caplog.messages == ["pairs cannot be recorded as a CUDA graph, and are balanced without: no room"]


class Copied:
    """`ReplayedPairs` without graphs: on copies, and only what fits."""

    made: ClassVar[list[Copied]] = []

    def __init__(self, first: Batch, second: Batch, running_sum: dict[str, torch.Tensor]) -> None:
        self.first, self.second, self._running_sum, self.turns = _copied(first), _copied(second), running_sum, 0
        self.made.append(self)

    def fits(self, batch: Batch) -> bool:
        return _signature(batch) == _signature(self.first)

    def take(self, batch: Batch, into: Batch) -> None:
        self.turns += 1
        ReplayedPairs.take(self, batch, into)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 1

    def table(self, _: int) -> torch.Tensor:
        return table(difference(self.first, self.second), self._running_sum)

    def add(self, _: int, weights_K: torch.Tensor) -> None:
        Pairs(difference(self.first, self.second), self._running_sum).add(0, weights_K)


@pytest.mark.parametrize("saved", range(9))
@pytest.mark.parametrize(("num", "batch"), [(24, 3), (26, 3), (27, 9)])
def test_copies_and_states_give_the_same_orders(
    num: int, batch: int, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved at every point of an epoch and loaded into a fresh ordering, also while a copied turn is held."""

    def orders(save_at: int | None) -> list[list[int]]:
        model, x, y = build("mlp", num)

        def fresh() -> Ordering:
            made = Ordering(num, batch_size=batch, unit_size=1, world=World.simulated(3), seed=3)
            made.attach(model, source="ghost")
            return made

        ordering, steps = fresh(), 0
        while ordering.epoch < 3:
            index = torch.from_numpy(ordering.remaining()[:batch])
            cross_entropy(model(x[index]), y[index]).backward()
            steps += 1
            if steps == save_at:
                state = ordering.state_dict()
                assert ordering._attachment is not None
                ordering._attachment.detach()  # from the model: the next one is attached to it
                ordering = fresh()
                ordering.load_state_dict(state)
        return [order.tolist() for order in ordering.orders]

    expected = orders(None)
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", Copied)
    Copied.made.clear()
    assert orders(saved + 8) == expected
    # Steps of one turn each are copied and those of three are not, not even a last one of one turn.
    assert bool(Copied.made) == (batch == 3)
    assert all(copied.turns > 2 for copied in Copied.made)


def test_a_model_that_moves_leaves_its_recording_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build("mlp", 12)
    records, shapes = recorded(model, x[:3], y[:3])
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", Copied)
    sorter = GhostPairs(3, Greedy())
    sorter.start_epoch(0, np.full(3, 8))
    for _ in range(4):
        sorter.add(records, shapes, np.ones((1, 3), dtype=bool))
    assert sorter._replayed is not None
    elsewhere = {key: record.like(tuple(t.to("meta") for t in record.tensors)) for key, record in records.items()}
    assert not sorter._replayed.fits(elsewhere)
    sorter._make_room(elsewhere, shapes)
    assert sorter._replayed is None


def test_a_gradient_that_is_not_finite_leaves_no_trace() -> None:
    model, x, y = build("mlp", 8)
    x[2] = torch.nan
    records, shapes = recorded(model, x, y)
    sorter = GhostPairs(4, Greedy())
    sorter.start_epoch(0, np.full(4, 2))
    sorter.add(records, shapes, np.ones((2, 4), dtype=bool))
    assert sorter.tallies()[0].nonfinite == 1
    assert all(bool(part.isfinite().all()) for part in sorter.running_sum.values())

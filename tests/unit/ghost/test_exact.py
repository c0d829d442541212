"""Records of a backward pass against the gradients of every example alone, the slow and obvious way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from _copied import Copied
from _inputs import randn
from _models import MODELS, build, one_by_one, orders_of_an_mlp, recorded
from cdgrab import Ordering, World, flat_grad
from cdgrab.balance.rules import Greedy
from cdgrab.balance.tables import decide
from cdgrab.ghost import Matrix
from cdgrab.ghost.pairs import Pairs, RowPairs, RunningSum, balance, difference, table
from cdgrab.ghost.passes import Batch, Pass
from cdgrab.ghost.records import Pair, Rows, written_out
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


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_rows_a_few_at_a_time(name: str, size: int, bad: bool) -> None:
    """Signs, what they were decided on, and the running sum are those of one table of all pairs."""
    model, x, y = build(name, 12)
    (first, shapes), (second, _) = recorded(model, x[:6], y[:6]), recorded(model, x[6:], y[6:])
    if bad:
        for record in second.values():
            record.tensors[-1][3] = torch.nan
    pairs = difference(first, second)
    sums = [RunningSum(), RunningSum()]
    for running_sum in sums:
        running_sum.make_room(first, shapes)
        for number, part in enumerate(running_sum.parts[key] for key in shapes):
            part.copy_(0.1 * randn(*part.shape, seed=number, dtype=part.dtype))
    whole = Pairs(pairs, sums[0])
    expected = decide(whole.table(0), Greedy())
    whole.add(0, expected[1])
    work = RowPairs(pairs, sums[1], size)
    assert len(work) == -(-6 // size)
    found = balance(work, Greedy())
    assert (expected[1] == 0).tolist() == [bad and k == 3 for k in range(6)]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert sums[0].flat_D is not None
    assert sums[1].flat_D is not None
    torch.testing.assert_close(sums[1].flat_D, sums[0].flat_D, rtol=1e-7, atol=1e-9)


def test_a_parameter_without_a_gradient_takes_no_room() -> None:
    """However large it is: its columns stay zero, and it is not among those that are put in place together."""
    pairs: Batch = {"weight": Matrix(randn(5, 2, 3), randn(5, 2, 4)), "bias": Rows(randn(5, 4))}
    shapes = {"unused": torch.Size((1000, 1000)), "weight": torch.Size((4, 3)), "bias": torch.Size((4,))}
    running_sum = RunningSum()
    running_sum.make_room(pairs, shapes)
    assert list(running_sum.parts) == ["weight", "unused", "bias"]
    work = RowPairs(pairs, running_sum, 2)
    assert work._small_Nd is not None
    assert work._small_Nd.shape == (5, 4)
    rows = written_out(pairs, {name: shapes[name] for name in ("weight", "bias")})
    torch.testing.assert_close(work.table(1)[:, :-1].float(), rows[2:4] @ rows[2:4].T)


def test_a_parameter_of_another_type_that_comes_later() -> None:
    shapes = {"first": torch.Size((3,)), "second": torch.Size((2,)), "third": torch.Size((2,))}
    running_sum = RunningSum()
    assert running_sum.make_room({"first": Rows(randn(5, 3))}, shapes)
    assert not running_sum.make_room({"first": Rows(randn(5, 3)), "third": Rows(randn(5, 2))}, shapes)
    running_sum.parts["first"].fill_(7)
    batch: Batch = {"first": Rows(randn(5, 3)), "second": Rows(randn(5, 2, dtype=torch.float64))}
    assert running_sum.make_room(batch, shapes)
    assert running_sum.flat_D is None
    assert [running_sum.parts[name].dtype for name in shapes] == [torch.float32, torch.float64, torch.float32]
    assert running_sum.parts["first"].tolist() == [7, 7, 7]


def test_a_state_without_a_parameter_makes_room_for_it() -> None:
    """As those of versions that knew only what had had a gradient."""
    shapes = {"weight": torch.Size((4, 3)), "bias": torch.Size((4,)), "late": torch.Size((2,))}
    running_sum = RunningSum()
    running_sum.load({"weight": torch.ones(4, 3), "bias": torch.full((4,), 2.0)})
    assert running_sum.small == ["bias"]
    late = {"bias": Rows(randn(5, 4)), "late": Rows(randn(5, 2))}
    batch: Batch = {"weight": Matrix(randn(5, 2, 3), randn(5, 2, 4)), **late}
    assert running_sum.make_room(batch, shapes)
    assert running_sum.flat_D is not None
    assert running_sum.flat_D.tolist() == 12 * [1] + 4 * [2] + 2 * [0]
    assert running_sum.small == ["bias", "late"]


def test_rows_of_parameters_that_gave_other_records_before() -> None:
    """Which of them are small, and lie last, was settled with the first records."""
    shapes = {"table": torch.Size((2, 3)), "bias": torch.Size((4,)), "none": torch.Size((2,))}
    running_sum = RunningSum()
    running_sum.make_room({"table": Matrix(randn(5, 1, 3), randn(5, 1, 2)), "bias": Rows(randn(5, 4))}, shapes)
    assert list(running_sum.parts) == ["table", "none", "bias"]
    rows = {"table": Rows(randn(5, 6, seed=1)), "bias": Rows(randn(5, 4, seed=2))}
    work = RowPairs({"bias": rows["bias"], "table": rows["table"]}, running_sum, 16)
    gram = sum(record.rows_ND @ record.rows_ND.T for record in rows.values())
    torch.testing.assert_close(work.table(0)[:, :-1].float(), gram)
    factors = Matrix(randn(5, 1, 2, seed=3), randn(5, 1, 2, seed=4))  # of what was small
    work = RowPairs({"bias": factors, "table": rows["table"]}, running_sum, 16)
    gram = rows["table"].rows_ND @ rows["table"].rows_ND.T + factors.rows() @ factors.rows().T
    torch.testing.assert_close(work.table(0)[:, :-1].float(), gram)


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

    expected = orders_of_an_mlp()
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", refuse)
    assert orders_of_an_mlp() == expected
    assert caplog.messages == ["pairs cannot be recorded as a CUDA graph, and are balanced without: no room"]


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
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda _: True)
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
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda _: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", Copied)
    sorter = GhostPairs(3, Greedy())
    sorter.start_epoch(0, np.full(3, 8))
    for _ in range(4):
        sorter.add(Pass.of(records), shapes, 1)
    assert sorter._replayed is not None
    elsewhere = {key: record.like(tuple(t.to("meta") for t in record.tensors)) for key, record in records.items()}
    assert not sorter._replayed.take_first(Pass.of(elsewhere))
    sorter._make_room(elsewhere, shapes)
    assert sorter._replayed is None


def test_a_gradient_that_is_not_finite_leaves_no_trace() -> None:
    model, x, y = build("mlp", 8)
    x[2] = torch.nan
    records, shapes = recorded(model, x, y)
    sorter = GhostPairs(4, Greedy())
    sorter.start_epoch(0, np.full(4, 2))
    sorter.add(Pass.of(records), shapes, 2)
    assert sorter.tallies()[0].nonfinite == 1
    assert all(bool(part.isfinite().all()) for part in sorter.running_sum.values())

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from _asserts import assert_follows_the_rule, assert_permutation
from _inputs import randn
from cdgrab import ORDERS, RULES, Ordering, World
from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing import reference
from cdgrab.balancing.balancer import Balancer
from cdgrab.balancing.rules import Greedy

BALANCED = ["cd-grab", "pair", "grab", "id-grab", "greedy-herding"]


def batches(ordering: Ordering) -> list[list[int]]:
    """What a loader would deliver."""
    examples = list(ordering.sampler)
    size = ordering.batch_size
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def rows_of(ordering: Ordering, batch: list[int], vectors: torch.Tensor) -> torch.Tensor:
    """One row per unit: the mean vector of its examples."""
    return torch.stack([unit.mean(0) for unit in vectors[batch].split(ordering.unit_size)])


def train_epoch(ordering: Ordering, vectors: torch.Tensor) -> list[list[int]]:
    delivered = batches(ordering)
    for batch in delivered:
        ordering.observe(rows_of(ordering, batch, vectors))
    return delivered


def test_epochs_of_cd_grab_equal_the_reference() -> None:
    """4 lanes with 9 units each (odd), 3 of them in a step: pairs straddle steps."""
    vectors = randn(36, 5, dtype=torch.float64)
    ordering = Ordering(36, batch_size=12, unit_size=1, lanes=4, seed=2)
    orders_WU = torch.stack(ordering.orders)
    for epoch in range(4):
        assert ordering.epoch == epoch
        train_epoch(ordering, vectors)
        next_WU, _ = reference.pair_balance(vectors[orders_WU])
        orders_WU = orders_WU.gather(1, next_WU)
        assert torch.equal(torch.stack(ordering.orders), orders_WU)


def test_uneven_lanes_equal_the_reference_with_the_short_ones_left_out_at_the_end() -> None:
    """10 units in 4 lanes: two have 3 units (one unpaired), two have 2."""
    vectors = randn(10, 5, dtype=torch.float64)
    ordering = Ordering(10, batch_size=4, unit_size=1, lanes=4)
    before = ordering.orders
    train_epoch(ordering, vectors)
    next_WU, _ = reference.pair_balance(vectors[torch.stack([order[:2] for order in before])])
    for lane, order in enumerate(before):
        expected = order[next_WU[lane]]
        if len(order) == 3:
            expected = torch.stack([expected[0], order[2], expected[1]])
        assert torch.equal(ordering.orders[lane], expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("length", "lanes", "batch_size", "unit_size"),
    [(1, 1, 1, 1), (7, 1, 3, 3), (20, 4, 8, 2), (21, 4, 8, 2), (3, 5, 5, 1), (50, 3, 12, 4), (64, 1, 16, 16)],
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_example_once_per_epoch(
    order: str, length: int, lanes: int, batch_size: int, unit_size: int, drop_last: bool
) -> None:
    if drop_last and length < batch_size:
        pytest.skip("drop_last leaves nothing, which is refused")
    vectors = randn(length, 4)
    ordering = Ordering(
        length,
        batch_size=batch_size,
        unit_size=unit_size,
        order=order,
        lanes=lanes,
        drop_last=drop_last,
    )
    for epoch in range(4):
        assert ordering.epoch == epoch
        delivered = [example for batch in train_epoch(ordering, vectors) for example in batch]
        if drop_last:
            assert len(set(delivered)) == len(delivered) == ordering.examples_per_epoch
        else:
            assert set(delivered) == set(range(length))
            assert len(delivered) == length


@pytest.mark.parametrize("order", ["rr", "global-rr", "flip-flop", "block-reversal"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_any_number_of_ranks_visits_the_same_examples_in_the_same_steps(order: str, size: int) -> None:
    """35 examples in global batches of 8: only who repeats an example in the last step differs."""
    alone = Ordering(35, batch_size=8, order=order, seed=5)
    ranks = [Ordering(35, batch_size=8 // size, order=order, seed=5, world=World(rank, size)) for rank in range(size)]
    for epoch in range(4):
        alone.set_epoch(epoch)
        steps = []
        for rank in ranks:
            rank.set_epoch(epoch)
            mine = list(rank.sampler)
            steps.append([mine[i : i + rank.batch_size] for i in range(0, len(mine), rank.batch_size)])
        for step, expected in enumerate(batches(alone)):
            together = [example for rank in steps for example in rank[step]]
            assert sorted(together) == sorted(expected) if len(expected) == 8 else set(expected) <= set(together)


def test_overwriting_the_buffer_changes_nothing() -> None:
    vectors = randn(24, 6)
    careful, careless = (Ordering(24, batch_size=3, unit_size=1, block=4) for _ in range(2))
    buffer = torch.empty(3, 6)
    for _ in range(3):
        for batch in batches(careful):
            careful.observe(vectors[batch])
            buffer.copy_(vectors[batch])
            careless.observe(buffer)
            buffer.fill_(torch.nan)
        assert torch.equal(careful.order, careless.order)
    assert careful.epoch == 3
    assert not torch.equal(careful.order, Ordering(24, batch_size=3, unit_size=1).order)


@pytest.mark.parametrize("order", BALANCED)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_block_does_not_change_results(order: str, rule: str, block: int) -> None:
    vectors = randn(37, 5, dtype=torch.float64)
    one, other = (
        Ordering(37, batch_size=6, unit_size=1, order=order, rule=rule, lanes=3, block=size) for size in (None, block)
    )
    for _ in range(3):
        train_epoch(one, vectors)
        train_epoch(other, vectors)
        assert torch.equal(one.order, other.order)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_type(dtype: torch.dtype) -> None:
    vectors = randn(20, 8).to(torch.bfloat16)
    expected, ordering = (Ordering(20, batch_size=4, unit_size=1) for _ in range(2))
    train_epoch(expected, vectors.double())
    for batch in batches(ordering):
        ordering.observe(vectors[batch].to(dtype))
    assert torch.equal(ordering.order, expected.order)


def test_numpy_rows_and_rows_that_require_grad() -> None:
    ordering = Ordering(4, batch_size=2, unit_size=1)
    ordering.observe(np.ones((2, 3)))  # type: ignore[arg-type]
    ordering.observe(torch.ones(2, 3, requires_grad=True))
    assert ordering.epoch == 1


def test_named_units_in_order_give_the_same_as_unnamed_ones() -> None:
    vectors = randn(26, 5)
    plain, named = (Ordering(26, batch_size=8, unit_size=2, lanes=4) for _ in range(2))
    for _ in range(3):
        for batch in batches(plain):
            rows = rows_of(plain, batch, vectors)
            plain.observe(rows)
            named.observe(rows, units=torch.tensor(batch))
        assert torch.equal(plain.order, named.order)


def test_named_units_out_of_order() -> None:
    """Pairs are formed as rows come in; the next order follows from that sequence."""
    vectors = randn(12, 5, dtype=torch.float64)
    ordering = Ordering(12, batch_size=3, unit_size=1, lanes=1)
    came = [batches(ordering)[i] for i in (2, 0, 3, 1)]
    for batch in came:
        ordering.observe(vectors[batch], units=torch.tensor(batch))
    sequence = torch.tensor(came).reshape(-1)
    expected = sequence[reference.pair_balance(vectors[sequence][None])[0][0]]
    assert torch.equal(ordering.order, expected)


def test_a_short_batch_may_come_early() -> None:
    vectors = randn(10, 3)
    for lanes in (1, 2, 4):
        ordering = Ordering(10, batch_size=4, unit_size=1, lanes=lanes)
        for batch in reversed(batches(ordering)):
            ordering.observe(vectors[batch], units=torch.tensor(batch))
        assert ordering.epoch == 1
        assert_permutation(ordering.order, range(10))
        assert len(ordering.orders) == lanes


def test_nonfinite_rows_keep_their_pair_and_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    vectors = randn(16, 4)
    hit, clean = (Ordering(16, batch_size=4, unit_size=1, lanes=1) for _ in range(2))
    spoilt = vectors.clone()
    spoilt[hit.order[1], 2] = torch.inf
    train_epoch(hit, spoilt)
    assert hit.metrics()["nonfinite"] == 1
    assert [r.message for r in caplog.records] == [
        "epoch 0: 1 gradients or pairs of them were not finite; they were left out and their units kept their order"
    ]
    first, second = clean.order[:2]
    assert hit.order[0] == first
    assert hit.order[-1] == second
    train_epoch(hit, vectors)
    assert hit.metrics()["nonfinite"] == 0


@pytest.mark.parametrize("order", ["grab", "id-grab", "greedy-herding"])
def test_nonfinite_rows_do_not_poison_later_epochs(order: str) -> None:
    vectors = randn(12, 4)
    ordering = Ordering(12, batch_size=4, unit_size=1, order=order)
    spoilt = vectors.clone()
    spoilt[5] = torch.nan
    train_epoch(ordering, spoilt)
    assert_permutation(ordering.order, range(12))
    train_epoch(ordering, vectors)
    assert ordering.metrics()["nonfinite"] == 0
    if order != "greedy-herding":
        assert 0 < ordering.metrics()["imbalance"] < 1


def test_a_broken_off_epoch_yields_a_valid_order_and_visits_the_rest_next() -> None:
    vectors = randn(20, 4)
    ordering = Ordering(20, batch_size=2, unit_size=1, lanes=1)
    first = ordering.order
    for batch in batches(ordering)[:5]:
        ordering.observe(vectors[batch])
    ordering.sampler.set_epoch(1)
    assert_permutation(ordering.order, range(20))
    assert set(ordering.order[5:15].tolist()) == set(first[10:].tolist())
    assert ordering.metrics()["unobserved"] == 10


def test_set_epoch_is_harmless_where_the_epoch_ended_by_itself() -> None:
    vectors = randn(20, 4)
    plain, usual = (Ordering(20, batch_size=4, unit_size=1) for _ in range(2))
    for epoch in range(4):
        usual.sampler.set_epoch(epoch)
        train_epoch(plain, vectors)
        train_epoch(usual, vectors)
        assert torch.equal(plain.order, usual.order)


def test_an_epoch_without_gradients_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    ordering = Ordering(20, batch_size=4)
    before = ordering.order
    ordering.sampler.set_epoch(1)
    assert "no gradient observed" in caplog.text
    assert torch.equal(ordering.order, before)
    assert ordering.epoch == 1
    caplog.clear()
    Ordering(20, batch_size=4, order="rr").sampler.set_epoch(1)
    assert not caplog.records


def test_metrics_tell_balanced_from_random() -> None:
    vectors = randn(4000, 4)
    ordering = Ordering(4000, batch_size=100, unit_size=1)
    assert ordering.metrics()["epoch"] == -1
    train_epoch(ordering, vectors)
    metrics = ordering.metrics()
    assert metrics["epoch"] == 0
    assert metrics["rows"] == 2000
    assert metrics["imbalance"] < 0.1
    assert 0.3 < metrics["flipped"] < 0.7
    assert metrics["unobserved"] == 0
    assert metrics["seconds"] > 0


def test_same_seed_same_orders_other_seed_other_orders() -> None:
    vectors = randn(30, 4)

    def run(seed: int) -> list[int]:
        ordering = Ordering(30, batch_size=5, unit_size=1, rule="walk", seed=seed)
        for _ in range(3):
            train_epoch(ordering, vectors)
        return ordering.order.tolist()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_independent_ranks_draw_differently() -> None:
    rows = randn(40, 4)
    signs = []
    for rank in range(2):
        ordering = Ordering(80, batch_size=40, unit_size=1, order="pair", rule="walk", lanes=2, world=World(rank, 2))
        ordering.observe(rows)
        signs.append(tuple(ordering.order.argsort().tolist()))
    assert signs[0] != signs[1]


def test_default_unit_is_an_example() -> None:
    assert Ordering(64, batch_size=16).unit_size == 1
    assert Ordering(64, batch_size=16, order="rr").unit_size == 1


def test_memory_does_not_grow_over_epochs() -> None:
    """Even one byte per unit and epoch left behind would show: 4096 of them in 100 epochs."""
    vectors = randn(4096, 3)
    ordering = Ordering(4096, batch_size=512, unit_size=1, lanes=4)
    train_epoch(ordering, vectors)
    tracemalloc.start()
    for _ in range(20):
        train_epoch(ordering, vectors)
    early = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        train_epoch(ordering, vectors)
    late = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert late - early < 100 * 4096 / 2


@pytest.mark.parametrize("order", ["cd-grab", "pair", "grab", "id-grab"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rule", ["greedy", "walk"])
def test_long_rows_give_the_orders_of_waiting_ones(
    order: str, fast: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 2^15 numbers or more are balanced as they come; `block` makes them wait."""
    if not fast:
        monkeypatch.setattr(compiled, "available", lambda: False)
    vectors = randn(22, 1 << 15, dtype=torch.float64)
    vectors[5] = torch.nan
    direct, waiting = (
        Ordering(22, batch_size=3, unit_size=1, order=order, rule=rule, lanes=3, block=block) for block in (None, 9)
    )
    for _ in range(2):
        train_epoch(direct, vectors)
        train_epoch(waiting, vectors)
        assert torch.equal(direct.order, waiting.order)
        assert direct.metrics()["nonfinite"] == waiting.metrics()["nonfinite"]
        assert direct.metrics()["imbalance"] == pytest.approx(waiting.metrics()["imbalance"])


def test_long_rows_equal_the_reference() -> None:
    vectors = randn(15, 1 << 15, dtype=torch.float64)
    ordering = Ordering(15, batch_size=3, unit_size=1, lanes=3)
    before = torch.stack(ordering.orders)
    train_epoch(ordering, vectors)
    expected = before.gather(1, reference.pair_balance(vectors[before])[0])
    assert torch.equal(torch.stack(ordering.orders), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_cores_do_not_change_signs(threads: int) -> None:
    rows, minus = randn(7, 1 << 15, dtype=torch.float64), randn(7, 1 << 15, seed=1, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        signs = Balancer(Greedy()).balance_visits(rows[:, None], minus[:, None])
    finally:
        torch.set_num_threads(before)
    assert assert_follows_the_rule(rows - minus, signs) == 1.0


def test_the_rest_may_come_early_but_once() -> None:
    """10 examples in units of 4: two units, and a rest of two."""
    ordering = Ordering(10, batch_size=4, unit_size=4)
    planned = list(ordering.sampler)
    ordering.observe(randn(1, 3), units=torch.tensor(planned[8:]))
    assert ordering.remaining().tolist() == planned[:8]
    with pytest.raises(ValueError, match="has been observed already"):
        ordering.observe(randn(1, 3), units=torch.tensor(planned[8:]))
    for start in (0, 4):
        ordering.observe(randn(1, 3), units=torch.tensor(planned[start : start + 4]))
    assert ordering.epoch == 1
    assert ordering.metrics()["unobserved"] == 0


@pytest.mark.parametrize("fast", [True, False])
def test_the_type_of_rows_may_change(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(compiled, "available", lambda: False)
    ordering, steady = (Ordering(8, batch_size=2, unit_size=1, block=2) for _ in range(2))
    vectors = randn(8, 3)
    for step, batch in enumerate(batches(ordering)):
        ordering.observe(vectors[batch].double() if step % 2 else vectors[batch])
        steady.observe(vectors[batch])
    assert torch.equal(ordering.order, steady.order)


def test_orders_without_gradients_shuffle_examples_and_need_no_rows() -> None:
    ordering = Ordering(40, batch_size=8, order="rr")
    first = batches(ordering)
    for _ in first:
        ordering.observe(torch.zeros(3))  # whatever the loop has: it is not looked at
    assert ordering.epoch == 1
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in batches(ordering)}


def test_the_length_of_the_loader_does_not_change_under_the_loop() -> None:
    ordering = Ordering(20, batch_size=2, unit_size=1)
    for _ in range(5):
        ordering.observe(randn(2, 3))
        assert len(ordering.sampler) == 20


def test_what_fills_no_unit_is_dropped_for_good_as_documented() -> None:
    ordering = Ordering(50, batch_size=8, unit_size=8, drop_last=True)
    visited: set[int] = set()
    for _ in range(5):
        visited |= {example for batch in train_epoch(ordering, randn(50, 3)) for example in batch}
    assert len(visited) == 48


def test_numpy_numbers_are_numbers() -> None:
    ordering = Ordering(np.int64(20), batch_size=np.int32(4), seed=np.int64(1))  # type: ignore[arg-type]
    ordering.sampler.set_epoch(np.int64(0))  # type: ignore[arg-type]
    assert ordering.batch_size == 4


def test_ranks_without_a_process_group_can_sample_but_not_balance() -> None:
    ordering = Ordering(20, batch_size=2, unit_size=1, world=World(0, 2))
    assert len(list(ordering.sampler)) == 10
    with pytest.raises(ValueError, match=r"coordinates 2 ranks, but torch\.distributed is not initialised"):
        ordering.observe(randn(2, 3))
    assert ordering.examples_left == 10


@pytest.mark.parametrize("order", ["cd-grab", "pair", "grab", "id-grab", "rr"])
@pytest.mark.parametrize("dim", [5, 40_000])
@pytest.mark.parametrize("per_step", [1, 2])
def test_several_steps_at_once(order: str, dim: int, per_step: int) -> None:
    """Blocks of steps give the orders of single steps, padding and a short last batch included."""
    vectors = randn(3 * 2 * 7 - 1, dim)

    def orders(steps_at_once: int) -> list[list[int]]:
        ordering = Ordering(len(vectors), batch_size=3 * per_step, unit_size=1, order=order, lanes=3)
        found = []
        for epoch in range(3):
            ordering.set_epoch(epoch)
            batches = torch.tensor(list(ordering.sampler)).split(3 * per_step)
            whole = [batch for batch in batches if len(batch) == 3 * per_step]
            for start in range(0, len(whole), steps_at_once):
                ordering.observe(torch.stack([vectors[batch] for batch in whole[start : start + steps_at_once]]))
            if len(whole) < len(batches):
                ordering.observe(vectors[batches[-1]])
            assert ordering.epoch == epoch + 1
            found.append(ordering.order.tolist())
        return found

    assert orders(4) == orders(1) == orders(100)


def test_more_steps_than_are_left() -> None:
    ordering = Ordering(8, batch_size=2, unit_size=1, lanes=2)
    with pytest.raises(ValueError, match="10 rows for a batch of 8 units"):
        ordering.observe(torch.ones(5, 2, 3))
    with pytest.raises(ValueError, match="without units="):
        ordering.observe(torch.ones(2, 2, 3), units=torch.arange(4))
    assert ordering.examples_left == 8


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("unit_size", [1, 2])
def test_which_examples_were_in_a_step(unit_size: int, drop_last: bool) -> None:
    ordering = Ordering(22, batch_size=4, unit_size=unit_size, drop_last=drop_last)
    data: Any = range(22)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, sampler=ordering.sampler)
    step = 0
    for _ in range(3):
        for batch in loader:
            planned = ordering.examples_of(step).tolist()  # before it is observed
            ordering.observe(randn(-(-len(batch) // unit_size), 3, seed=step))
            assert planned == batch.tolist()
            if step + 1 < ordering.epoch * len(loader) + len(loader) and step >= ordering.epoch * len(loader):
                assert ordering.examples_of(step).tolist() == planned  # and afterwards
            step += 1
    assert step == 3 * len(loader)
    saved = ordering.state_dict()
    fresh = Ordering(22, batch_size=4, unit_size=unit_size, drop_last=drop_last)
    fresh.load_state_dict(saved)
    assert fresh.examples_of(step).tolist() == ordering.examples_of(step).tolist()


def test_steps_whose_examples_are_not_known() -> None:
    ordering = Ordering(8, batch_size=2)
    with pytest.raises(ValueError, match=r"step 5 is in epoch 1, and this is epoch 0, with steps 0 to 3; load a state"):
        ordering.examples_of(5)
    with pytest.raises(ValueError, match="step is -1; it must be a whole number, 0 or more"):
        ordering.examples_of(-1)
    ordering.observe(randn(2, 3), units=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"rows of this epoch came with units=, so batches may have come in any order"):
        ordering.examples_of(0)

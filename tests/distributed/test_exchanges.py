"""Real ranks, whatever their exchange, find the orders of the reference and of one process."""

from __future__ import annotations

import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from _inputs import randn
from cdgrab import ORDERS, Ordering, World
from cdgrab.balancing import reference
from distributed._ranks import run_ranks, start_ranks

EPOCHS = 3
# (examples, dim): odd dims, dims smaller than the number of ranks, uneven shards.
SHAPES = [(43, 7), (16, 1), (30, 62), (5, 13)]
CASES = [
    ("cd-grab", "greedy", "sharded"),
    ("cd-grab", "greedy", "gather"),
    ("cd-grab", "greedy", "server"),
    ("cd-grab", "walk", "sharded"),
    ("cd-grab", "halving", "server"),
    ("grab", "greedy", "gather"),
    ("grab", "walk", "server"),
    ("pair", "walk", None),
    ("id-grab", "greedy", None),
    ("greedy-herding", "greedy", "gather"),
    *((order, "greedy", None) for order, spec in ORDERS.items() if not spec.needs_gradients),
]


def epochs_of(ordering: Ordering, vectors: torch.Tensor) -> list[list[list[int]]]:
    """The orders after each epoch; a spoilt row in the second."""
    orders = []
    for epoch in range(EPOCHS):
        while ordering.epoch == epoch:
            batch = ordering.remaining().tolist()[: ordering.batch_size]
            rows = vectors[batch].clone()
            if epoch == 1:
                rows[torch.tensor(batch) == 3] = torch.nan
            ordering.observe(rows)
        orders.append([order.tolist() for order in ordering.orders])
    return orders


def on_a_rank(batch: int, lanes: int | None) -> dict[tuple[int, int], list[list[list[list[int]]]]]:
    """`batch` is that of all ranks together."""
    local = batch // dist.get_world_size()
    return {
        (length, dim): [
            epochs_of(
                Ordering(
                    length,
                    batch_size=local,
                    unit_size=1,
                    lanes=lanes,
                    order=order,
                    rule=rule,
                    exchange=exchange,
                    seed=3,
                ),
                randn(length, dim, dtype=torch.float64),
            )
            for order, rule, exchange in CASES
        ]
        for length, dim in SHAPES
    }


@pytest.mark.parametrize(
    ("size", "batch", "lanes"),
    [(1, 8, None), (2, 8, None), (4, 8, None), (8, 8, None), (3, 6, None), (2, 8, 4), (4, 16, 4)],
)
def test_orders_are_the_same_on_any_number_of_ranks(size: int, batch: int, lanes: int | None) -> None:
    answers = run_ranks(size, on_a_rank, batch, lanes)
    for length, dim in SHAPES:
        vectors = randn(length, dim, dtype=torch.float64)
        for index, (order, rule, _) in enumerate(CASES):
            alone = Ordering(length, batch_size=batch, unit_size=1, lanes=lanes, order=order, rule=rule, seed=3)
            expected = epochs_of(alone, vectors)
            for epoch in range(EPOCHS):
                found = [answers[lane % size][length, dim][index][epoch][lane // size] for lane in range(alone.lanes)]
                assert found == expected[epoch], (order, rule, length, dim, epoch)


def signs_of_an_epoch(exchange: str, dim: int) -> list[int]:
    size = dist.get_world_size()
    ordering = Ordering(12 * size, batch_size=3, unit_size=1, lanes=size, exchange=exchange, seed=1)
    vectors = randn(12 * dist.get_world_size(), dim, dtype=torch.float64)
    while ordering.epoch == 0:
        ordering.observe(vectors[ordering.remaining()[:3]])
    return ordering.order.tolist()


@pytest.mark.parametrize(("size", "dim"), [(2, 9), (3, 10), (4, 5)])
def test_orders_are_those_of_the_reference(size: int, dim: int) -> None:
    vectors = randn(12 * size, dim, dtype=torch.float64)
    before = torch.stack(Ordering(12 * size, batch_size=size, unit_size=1, lanes=size, seed=1).orders)
    expected = before.gather(1, reference.pair_balance(vectors[before])[0]).tolist()
    for exchange in ("sharded", "gather", "server"):
        assert run_ranks(size, signs_of_an_epoch, exchange, dim) == expected


def saved_and_resumed() -> bool:
    """A state taken on every rank, in the middle of a pair, goes on exactly."""
    vectors = randn(40, 9)

    def steps(ordering: Ordering, count: int) -> list[list[int]]:
        seen = []
        for _ in range(count):
            batch = ordering.remaining()[:2]
            ordering.observe(vectors[batch])
            seen.append([*batch.tolist(), *ordering.order.tolist()])
        return seen

    for exchange in ("sharded", "gather", "server"):
        for stop in (0, 3, 4, 10, 13):
            straight, resumed = (Ordering(40, batch_size=2, unit_size=1, exchange=exchange) for _ in range(2))
            steps(straight, stop)
            resumed.load_state_dict(straight.state_dict())
            if steps(straight, 12) != steps(resumed, 12):
                return False
    return True


def test_resume_leaves_no_trace_on_ranks() -> None:
    assert run_ranks(2, saved_and_resumed) == [True, True]


def saved_and_loaded_by_another_exchange() -> list[str]:
    """Messages; between epochs nothing is left of what an exchange does, and there are none."""
    vectors, messages = randn(40, 9), []

    def steps(ordering: Ordering, count: int) -> None:
        for _ in range(count):
            ordering.observe(vectors[ordering.remaining()[:2]])

    for saved, loaded in (("sharded", "gather"), ("server", "sharded"), ("gather", "server")):
        first, second = (Ordering(40, batch_size=2, unit_size=1, exchange=name) for name in (saved, loaded))
        steps(first, 10)
        second.load_state_dict(first.state_dict())
        steps(first, 10)
        steps(second, 10)
        assert first.epoch == second.epoch == 2
        assert first.order.tolist() == second.order.tolist()
        steps(first, 1)
        try:
            second.load_state_dict(first.state_dict())
        except ValueError as error:
            messages.append(str(error))
        assert len(second.remaining()) == 20
    first, second = (Ordering(40, batch_size=2, unit_size=1, order="grab", exchange=e) for e in ("gather", "server"))
    steps(first, 10)
    try:
        second.load_state_dict(first.state_dict())
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_within_an_epoch_a_state_belongs_to_its_exchange() -> None:
    found = [
        "as rows (exchange 'sharded'), and this ordering has them as rows (exchange 'gather'); make the ordering",
        "as rows (exchange 'server'), and this ordering has them as rows (exchange 'sharded')",
        "as rows (exchange 'gather'), and this ordering has them as rows (exchange 'server')",
        "(exchange 'server'), and order 'grab' goes on from earlier epochs",  # by a mean
    ]
    for messages in run_ranks(2, saved_and_loaded_by_another_exchange):
        assert [part in message for part, message in zip(found, messages, strict=True)] == [True] * 4


def disagree(field: str) -> None:
    arguments: dict[str, Any] = {"dataset": 20, "batch_size": 2, "unit_size": 1, "seed": 0, "order": "cd-grab"}
    if dist.get_rank() == 1:
        arguments[field] = {"dataset": 22, "batch_size": 4, "seed": 5, "order": "pair"}[field]
    Ordering(**arguments)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("seed", "ranks disagree on seed of the ordering (rank 0: 0, rank 1: 5)"),
        ("order", "ranks disagree on order of the ordering (rank 0: 'cd-grab', rank 1: 'pair')"),
        ("batch_size", "ranks disagree on batch_size of the ordering (rank 0: 2, rank 1: 4)"),
        ("dataset", "ranks disagree on num_examples of the ordering (rank 0: 20, rank 1: 22)"),
    ],
)
def test_disagreement_at_the_start_is_an_error_on_every_rank(field: str, message: str) -> None:
    for _, error in start_ranks(2, disagree, field, timeout=20):
        assert error is not None
        assert error.startswith("ValueError")
        assert message in error


def tampered() -> None:
    ordering = Ordering(8, batch_size=2, unit_size=1, exchange="gather")
    for step in range(2):
        if step == 1 and dist.get_rank() == 1:
            sorter: Any = ordering._epochs.intake.sorter
            sorter.add(torch.ones(2, 4, 3))
        ordering.observe(randn(2, 3, seed=dist.get_rank()))


def test_a_wrong_sign_is_found_at_the_end_of_the_epoch() -> None:
    for _, error in start_ranks(2, tampered, timeout=20):
        assert error is not None
        assert re.search(r"RuntimeError: ranks disagree on the signs of an epoch \(rank 0: epoch 0, digest", error)


def one_batch_fewer() -> None:
    ordering = Ordering(16, batch_size=2, unit_size=1)
    for _ in range(4 - dist.get_rank()):
        ordering.observe(randn(2, 3))
    ordering.sampler.set_epoch(1)


def test_a_rank_with_one_batch_fewer_fails_within_the_time_out() -> None:
    errors = [error for _, error in start_ranks(2, one_batch_fewer, timeout=3)]
    assert all(error is not None for error in errors)


def dies() -> None:
    ordering = Ordering(16, batch_size=2, unit_size=1)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            raise OSError("out of memory")
        ordering.observe(randn(2, 3))


def test_a_rank_that_dies_takes_the_others_down_within_the_time_out() -> None:
    (_, survivor), (_, dead) = start_ranks(2, dies, timeout=8)
    assert dead is not None
    assert "out of memory" in dead
    assert survivor is not None
    assert "no answer" not in survivor


def on_a_mesh() -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="the device mesh has 2 dimensions"):
        World.detect(mesh)
    ordering = Ordering(8, batch_size=2, unit_size=1, group=mesh["dp"])
    for _ in range(2):
        ordering.observe(randn(2, 3, seed=ordering.world.rank))
    return ordering.world.rank, ordering.world.size


def test_tensor_parallel_peers_have_the_same_lanes() -> None:
    assert run_ranks(4, on_a_mesh) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def named_backwards(exchange: str) -> tuple[list[int], float]:
    """Batches come last first, so that padding and the rest come before the units."""
    ordering = Ordering(11, batch_size=2, unit_size=1, exchange=exchange)
    vectors = randn(11, 3)
    for _ in range(2):
        for batch in reversed(torch.tensor(list(ordering.sampler)).split(2)):
            ordering.observe(vectors[batch], units=batch)
    return ordering.order.tolist(), ordering.metrics()["unobserved"]


@pytest.mark.parametrize("exchange", ["sharded", "gather", "server"])
def test_named_units_out_of_order_on_ranks(exchange: str) -> None:
    answers = run_ranks(2, named_backwards, exchange)
    assert sorted(example for order, _ in answers for example in order) == list(range(11))
    assert [unobserved for _, unobserved in answers] == [0, 0]


def waits_at_exit() -> list[tuple[Any, ...]]:
    registered: list[tuple[Any, ...]] = []
    with mock.patch("atexit.register", lambda *call: registered.append(call)):
        for seed in (0, 1):
            Ordering(20, batch_size=2, seed=seed)
    return [call for call in registered if call[0] is time.sleep]


def test_ranks_wait_once_for_the_threads_of_gloo_before_python_closes() -> None:
    # Without that one FSDP run in six ended with an abort on a busy machine; no test can make it happen for certain.
    assert [len(waits) for waits, _ in start_ranks(2, waits_at_exit)] == [1, 1]

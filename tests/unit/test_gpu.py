"""Rows on a GPU give the orders of rows on the CPU. Skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

import cdgrab
from _inputs import randn
from cdgrab import Ordering

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def epochs(ordering: Ordering, vectors: torch.Tensor, count: int = 2) -> list[list[int]]:
    orders = []
    for _ in range(count):
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            batch = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
            ordering.observe(vectors[batch.to(vectors.device)])
        orders.append(ordering.order.tolist())
    return orders


@pytest.mark.parametrize("order", ["cd-grab", "pair", "grab", "id-grab", "greedy-herding"])
@pytest.mark.parametrize("dim", [7, 40_000])
def test_orders_are_those_of_the_cpu(order: str, dim: int) -> None:
    vectors = randn(26, dim, dtype=torch.float64)
    vectors[3] = torch.nan
    here, there = (Ordering(26, batch_size=6, unit_size=1, order=order, lanes=3) for _ in range(2))
    assert epochs(there, vectors.cuda()) == epochs(here, vectors)


@pytest.mark.parametrize("dim", [7, 40_000])
@pytest.mark.parametrize("order", ["cd-grab", "grab"])
def test_a_state_follows_its_rows(dim: int, order: str) -> None:
    vectors = randn(24, dim, dtype=torch.float64)

    def fresh() -> Ordering:
        return Ordering(24, batch_size=3, unit_size=1, order=order, lanes=3)

    straight, resumed = fresh(), fresh()
    for _ in range(3):
        straight.observe(vectors[torch.from_numpy(straight.remaining()[:3])].cuda())
    resumed.load_state_dict(straight.state_dict())
    assert epochs(resumed, vectors.cuda()) == epochs(straight, vectors.cuda())


def test_vectors_on_a_gpu() -> None:
    vectors = randn(4, 200, 8, dtype=torch.float64)
    orders = cdgrab.balance_vectors(vectors.cuda(), rounds=3)
    assert torch.equal(orders.cpu(), cdgrab.balance_vectors(vectors, rounds=3))
    assert cdgrab.herding_bound(vectors.cuda(), orders) == pytest.approx(cdgrab.herding_bound(vectors, orders))


@pytest.mark.parametrize("dim", [40, 40_000])
@pytest.mark.parametrize("order", ["cd-grab", "grab"])
def test_nothing_waits_for_the_device(dim: int, order: str) -> None:
    vectors = randn(64, dim).cuda()
    ordering = Ordering(64, batch_size=4, unit_size=1, order=order, lanes=4)
    for _ in range(4):  # memory is allocated, kernels are compiled
        ordering.observe(vectors[:4])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 11):
            ordering.observe(vectors[4 * step : 4 * step + 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")

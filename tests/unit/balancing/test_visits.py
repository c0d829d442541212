"""Differences balanced visit by visit, where they lie: any layout, any number of visits at a time, the same signs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from _asserts import assert_follows_the_rule
from _inputs import randn
from cdgrab import ORDERS, Ordering
from cdgrab.balancing.balancer import Balancer, Signs
from cdgrab.balancing.rules import Greedy
from cdgrab.balancing.sorter import make_sorter
from cdgrab.orders.decisions import Decisions

pytestmark = pytest.mark.usefixtures("engine")

# Tables of several rows are rounded by block.
COMPILED = pytest.mark.parametrize("engine", ["compiled"], indirect=True)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "visits": lambda rows: rows.contiguous(),
    "lanes first": lambda rows: rows.transpose(0, 1).contiguous().transpose(0, 1),
    "every other visit": lambda rows: torch.stack([rows, rows + 1], 1).flatten(0, 1)[::2],
    "columns first": lambda rows: rows.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "padded": lambda rows: torch.nn.functional.pad(rows, (3, 5))[..., 3:-5],
}


def signs_of(rows: Tensor, minus: Tensor, at_a_time: int = 10**6) -> tuple[Signs, Balancer]:
    balancer = Balancer(Greedy())
    parts = zip(rows.split(at_a_time), minus.split(at_a_time), strict=True)
    return np.concatenate([balancer.balance_visits(*part) for part in parts]), balancer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [1, 19, 5569])
def test_signs_follow_the_rule_whatever_the_layout(layout: str, lanes: int, dim: int) -> None:
    rows, minus = randn(9, lanes, dim, seed=dim), randn(9, lanes, dim, seed=dim + 1)
    signs, balancer = signs_of(LAYOUTS[layout](rows), minus)
    differences = (rows - minus).flatten(0, 1)
    assert_follows_the_rule(differences, signs)
    expected = torch.as_tensor(signs, dtype=torch.float64) @ differences.double()
    torch.testing.assert_close(balancer.running_sum.double(), expected, rtol=1e-4, atol=1e-4)


def test_one_mean_may_be_taken_from_all_visits() -> None:
    rows, mean = randn(6, 3, 40), randn(3, 40, seed=1)
    signs, _ = signs_of(rows, mean.expand_as(rows))
    np.testing.assert_array_equal(signs, signs_of(rows, mean.repeat(6, 1, 1))[0])


@COMPILED
@pytest.mark.parametrize("lanes", [1, 3, 4])
@pytest.mark.parametrize("at_a_time", [1, 2, 5])
def test_visits_that_come_together_are_rounded_alike(lanes: int, at_a_time: int) -> None:
    rows, minus = randn(30, lanes, 300, seed=2), randn(30, lanes, 300, seed=3)
    signs, balancer = signs_of(rows, minus)
    others, other = signs_of(rows, minus, at_a_time)
    np.testing.assert_array_equal(signs, others)
    assert torch.equal(balancer.running_sum, other.running_sum)
    assert balancer.tally.settled() == other.tally.settled()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])  # the last only when it is squared
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_rows_that_are_not_finite_leave_no_trace(bad: float, lanes: int) -> None:
    rows, minus = randn(12, lanes, 30), randn(12, lanes, 30, seed=1)
    for visit in (0, 4, 11):
        for lane in range(0, lanes, 2):
            rows[visit, lane, 7] = bad
    signs, balancer = signs_of(rows, minus)
    finite = ((rows - minus).square().sum(-1) < torch.inf).flatten()
    assert (signs[~finite.numpy()] == 1).all()
    kept = (rows - minus).flatten(0, 1)[finite]
    np.testing.assert_array_equal(signs[finite.numpy()], Balancer(Greedy()).balance(kept))
    tally = balancer.tally.settled()
    assert (tally.rows, tally.nonfinite) == (12 * lanes, int((~finite).sum()))
    assert tally.norm2 == pytest.approx(float(balancer.running_sum.double().square().sum()), rel=1e-4)


@COMPILED
@pytest.mark.parametrize("order", ["cd-grab", "pair", "grab", "id-grab"])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("batch", [3, 6, 9, 12])  # one unit of a lane, two, three, four: two pairs in a step
def test_orders_do_not_depend_on_how_many_steps_are_observed_together(order: str, steps: int, batch: int) -> None:
    # 40 steps are more than wait (2^16 numbers); fewer wait first.
    vectors = randn(360, 600, seed=4)

    def orders(steps: int) -> tuple[Tensor, ...]:
        ordering = Ordering(360, batch_size=batch, unit_size=1, order=order, lanes=3)
        for _ in range(2):
            for index in torch.from_numpy(ordering.remaining()).split(batch * steps):
                ordering.observe(vectors[index].view(-1, batch, 600))
        return ordering.orders

    for found, expected in zip(orders(steps), orders(40), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ["cd-grab", "pair"])
def test_lanes_that_miss_visits_have_signs_of_their_own(order: str) -> None:
    """A pair is balanced where a lane has both of it, against the sum of all lanes or of its own."""
    rows, counts = randn(40, 4, 6, dtype=torch.float64), randn(40, 4, seed=1).numpy() > -0.7
    sorter = make_sorter(ORDERS[order], [np.random.default_rng(0) for _ in range(4)], Greedy)
    assert sorter is not None
    sorter.start_epoch(0, counts.sum(0))
    for step in np.split(np.arange(40), [1, 8, 9, 23]):
        sorter.add(rows[step], counts[step])
    sorter.close()
    expected, sums = np.zeros((20, 4)), torch.zeros(4, 6, dtype=torch.float64)
    for pair, lane in zip(*np.nonzero(counts[::2] & counts[1::2]), strict=True):
        difference, own = rows[2 * pair, lane] - rows[2 * pair + 1, lane], lane if order == "pair" else 0
        expected[pair, lane] = 1 if float(sums[own] @ difference) <= 0 else -1
        sums[own] += expected[pair, lane] * difference
    np.testing.assert_array_equal(sorter.decisions.joined(), expected)


@pytest.mark.parametrize("paired", [False, True])
def test_decisions_keep_their_order(paired: bool) -> None:
    rng, decisions, expected = np.random.default_rng(0), Decisions(3, paired=paired), []
    for number in range(3000):  # more than are left lying
        line = rng.choice(np.array([-1, 1], dtype=np.int8), (1, 3))
        lanes = rng.integers(0, 2, (1, 3)).astype(bool) if number % 5 == 0 else None
        given = line[0] if lanes is None else line[lanes]
        decisions.append(torch.from_numpy(given).double() if number % 3 else given, lanes)
        line = line if lanes is None else np.where(lanes, line, 0)
        expected += [line, -line] if paired else [line]
    np.testing.assert_array_equal(decisions.of_units(), np.concatenate(expected))


def test_a_digest_knows_every_sign_of_every_lane() -> None:
    """Ranks compare digests; numbers of signs are the same everywhere."""
    signs = np.where(randn(6, 3).numpy() > 0, 1, -1).astype(np.int8)
    digests = set()
    for changed in [None, *np.ndindex(6, 3)]:
        decisions, mine = Decisions(3, paired=True), signs.copy()
        if changed is not None:
            mine[changed] *= -1
        decisions.append(mine.flatten())
        digests.add(decisions.digest())
    assert len(digests) == 19

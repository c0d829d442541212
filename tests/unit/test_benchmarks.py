"""What the benchmarks compare decides the same signs; a benchmark of two different things is worth nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import exchange, pace, ranks, report, scaling, sketch_quality, sketch_tasks, step
from benchmarks.sorter import blocked, loop, new_sorter

from _inputs import randn
from cdgrab_experiments.choices import Choices
from cdgrab_experiments.tasks import find_task
from distributed._ranks import run_ranks


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("num_workers", "dim"), [(3, 7), (2, 40_000)])
def test_the_sorter_and_the_loop_agree(fast: bool, num_workers: int, dim: int) -> None:
    rows_UWD = randn(12, num_workers, dim, dtype=torch.float32)
    assert blocked(new_sorter(num_workers), rows_UWD, fast=fast).tolist() == loop(rows_UWD)


def test_exchanges_are_measured() -> None:
    answers = list(ranks.launch(exchange.on_a_rank, 2, [1000], exchange.CONTENDERS, 1))
    [(dim, seconds, sent, memory)] = answers
    assert dim == 1000
    assert list(seconds) == list(sent) == list(memory) == exchange.CONTENDERS
    assert all(len(times) == 1 and times[0] > 0 for times in seconds.values())
    table_bytes = 2 * 8 * 2 * 3 / 2 / 2  # sent by one of two ranks, of a 2 x 3 table, for one pair in two steps
    assert sent["sharded"] == pytest.approx(1 + table_bytes / 4000)
    assert memory["sharded"] == 1.5


def _steps() -> list[Any]:
    return list(step.on_a_rank(["small-mlp"], step.KINDS, 1))


def test_steps_are_measured() -> None:
    [(name, count, found)] = run_ranks(2, _steps)[0]
    assert (name, count) == ("small-mlp", 396_210)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds, _ in found.values())
    assert found["sketch"].sent == 16 * 1024 * 4  # 16 examples with 1,024 numbers each, to one other rank
    assert found["plain"].sent == 0


def test_shares_of_a_gain() -> None:
    exact = [1.0, 2.0, 3.0]
    assert sketch_quality.share_of([0.5, 1.0, 1.5], exact) == pytest.approx((0.5, 0.5, 0.5))
    share, low, high = sketch_quality.share_of([1.0, 2.0, 1.5], exact)
    assert share == pytest.approx(0.75)
    assert low < 0.75 < high


def test_epochs_to_a_loss() -> None:
    assert sketch_quality.reached({"losses": [4.0, 2.0, 1.0]}, 3.0) == 1.5
    assert sketch_quality.reached({"losses": [4.0, 2.0, 1.0]}, 5.0) == 1
    assert sketch_quality.reached({"losses": [4.0, 2.0, 1.0]}, 0.5) == 3


def test_losses_of_a_small_task() -> None:
    task = replace(sketch_tasks.TASKS["softmax"], epochs=2)
    for order, attach in sketch_quality.contenders(before=False).values():
        first, second = sketch_tasks.losses(task, Path(), 0, order, attach)
        assert 0 < second < first < 1


def test_paces_are_measured() -> None:
    seconds = pace.measure("digits", find_task("digits").load(Path(), "softmax", 0), Choices(), 2, "cpu")
    assert list(seconds) == ["rr", "cd-grab"]
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())


def test_a_failing_rank_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a rank failed: rank 0: KeyError"):
        list(ranks.launch(_fails, 1))


def _fails() -> Iterator[None]:
    yield
    raise KeyError("gone")


def test_the_cost_model_finds_the_constants_of_a_machine_that_obeys_it(tmp_path: Path) -> None:
    constants = np.array([0.7, 0.2, 0.05])
    rows = [
        [str(size), f"{dim:,}", name, repr(float(np.array(scaling.features(dim, size, name)) @ constants)), "", "", ""]
        for size in (2, 4, 8)
        for dim in (60_000, 2_000_000)
        for name in ("all-reduce", "sharded")
    ]
    (tmp_path / "report.md").write_text("# Title\n\n" + report.table([""] * 7, rows))
    found, checked = scaling.check(scaling.measured(tmp_path / "report.md"))
    np.testing.assert_allclose(found, constants, rtol=1e-6)
    assert [row[5] for row in checked] == ["1.00"] * 12

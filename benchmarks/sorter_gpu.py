"""The sorter on a GPU: microseconds for one pair of every worker, beside the loop and the time to read the rows once.

python -m benchmarks.sorter_gpu
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks import report
from benchmarks.sorter import blocked, loop, new_sorter

SHAPES = [(64, 62_006, 64), (8, 124_000_000, 2), (16, 10_000_000, 4), (4, 1_081_792, 64)]  # workers, dim, turns
TARGETS = {(64, 62_006): "60x the loop", (8, 124_000_000): "2.5x the reading"}


def microseconds(function: Callable[[], object], rounds: int = 15) -> float:
    """Median time on the device."""
    function()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure and write the report."""
    rows = []
    for num_workers, dim, turns in SHAPES:
        rows_UWD = torch.randn(turns, num_workers, dim, device="cuda")
        sorter, pairs = new_sorter(num_workers), turns // 2
        with torch.device("cuda"):
            in_loop = microseconds(lambda rows=rows_UWD: loop(rows), rounds=5) / pairs  # type: ignore[misc]
            expected = loop(rows_UWD)
        sorted_ = (
            microseconds(lambda sorter=sorter, rows=rows_UWD: blocked(sorter, rows, fast=False)) / pairs  # type: ignore[misc]
        )
        found = blocked(sorter, rows_UWD, fast=False).tolist()
        read = microseconds(lambda rows=rows_UWD: rows.sum()) / pairs  # type: ignore[misc]
        rows.append(
            [
                f"{num_workers} x {dim:,}",
                f"{in_loop:.0f}",
                f"{sorted_:.0f}",
                f"{read:.0f}",
                f"{in_loop / sorted_:.1f}x",
                f"{sorted_ / read:.2f}x",
                TARGETS.get((num_workers, dim), ""),
                f"{sum(a == b for a, b in zip(expected, found, strict=True)) / len(found):.1%}",
            ]
        )
        del rows_UWD, sorter
        torch.cuda.empty_cache()
    header = [
        "workers x dim",
        "loop",
        "sorter",
        "reading the rows",
        "faster than the loop",
        "times the reading",
        "target",
        "same signs",
    ]
    body = "Microseconds for one pair of every worker (two steps' rows).\n\n" + report.table(header, rows)
    report.write("sorter", "The sorter on a GPU", body)


if __name__ == "__main__":
    main()

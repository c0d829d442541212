"""The sorter on a GPU: milliseconds per step pair of all workers, beside the loop and the time to read the rows once.

python -m benchmarks.sorter_gpu
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks import report
from benchmarks.sorter import blocked, loop, new_sorter

SHAPES = [(64, 62_006), (8, 124_000_000)]


def milliseconds(function: Callable[[], object], rounds: int = 7) -> float:
    """Median time on the device."""
    function()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def main() -> None:
    """Measure and write the report."""
    rows = []
    for num_workers, dim in SHAPES:
        rows_UWD = torch.randn(2, num_workers, dim, device="cuda")
        sorter = new_sorter(num_workers)
        with torch.device("cuda"):
            in_loop = milliseconds(lambda rows=rows_UWD: loop(rows), rounds=3)  # type: ignore[misc]
        sorted_ = milliseconds(lambda sorter=sorter, rows=rows_UWD: blocked(sorter, rows, fast=False))  # type: ignore[misc]
        read = milliseconds(lambda rows=rows_UWD: rows.sum())  # type: ignore[misc]
        rows.append(
            [
                f"{num_workers} x {dim:,}",
                f"{in_loop:.2f}",
                f"{sorted_:.2f}",
                f"{read:.2f}",
                f"{in_loop / sorted_:.1f}x",
                f"{sorted_ / read:.1f}x",
            ]
        )
        del rows_UWD, sorter
    header = ["workers x dim", "loop", "sorter", "reading the rows", "faster than the loop", "times the reading"]
    body = "Milliseconds for one pair of every worker (two steps' rows).\n\n" + report.table(header, rows)
    report.write("sorter", "The sorter on a GPU", body)


if __name__ == "__main__":
    main()

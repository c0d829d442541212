"""What coordination should cost on many ranks: a model of latency, bandwidth and arithmetic, and a check of it.

    python -m benchmarks.scaling [benchmarks/results/exchange_cpu_DATE.md]

The model's constants for this machine are fitted to the measured points with 2 and 4 ranks and checked on those with 8.
The projection takes the constants of a stated cluster instead.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import report

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """What a rank can do. Seconds, and bytes or operations per second."""

    latency: float
    network: float
    memory: float
    arithmetic: float
    sign: float  # seconds to decide one sign, the others being decided one after the other


GPUS = Cluster(latency=5e-6, network=50e9, memory=4e12, arithmetic=40e12, sign=1e-7)


def all_reduce(cluster: Cluster, dim: float, ranks: int) -> float:
    """Reduce-scatter and all-gather; the latency of trees."""
    return 2 * math.log2(ranks) * cluster.latency + 2 * (ranks - 1) / ranks * 4 * dim / cluster.network


def sharded(cluster: Cluster, dim: float, ranks: int) -> dict[str, float]:
    """Seconds per step of the parts that come on top of the bytes of an all-reduce; a pair comes every second step."""
    width = dim / ranks
    table = 8 * ranks * (ranks + 1)  # bytes
    return {
        "messages": 2 * (ranks - 1) * cluster.latency / 8 - 2 * math.log2(ranks) * cluster.latency,  # 8 in flight
        "mean": 4 * dim / cluster.memory,
        "table": (ranks * dim / cluster.arithmetic + 2 * 4 * dim / cluster.memory) / 2,
        "table all-reduce": (2 * math.log2(ranks) * cluster.latency + 2 * table / cluster.network) / 2,
        "signs": ranks * cluster.sign / 2,
        "running sum": (4 * dim + 8 * width) / cluster.memory / 2,
    }


def project(cluster: Cluster, dims: list[float], ranks: list[int]) -> list[list[str]]:
    """Rows of the projection."""
    rows = []
    for dim in dims:
        for count in ranks:
            plain, extra = all_reduce(cluster, dim, count), sharded(cluster, dim, count)
            table_bytes = 8 * count * (count + 1)
            rows.append(
                [
                    f"{dim / 1e6:,.0f} M",
                    f"{count:,}",
                    f"{plain * 1e3:.2f}",
                    f"{(plain + sum(extra.values())) / plain:.2f}x",
                    max(extra, key=lambda part: extra[part]),
                    f"{1 + table_bytes / (8 * dim):.3f}x",
                ]
            )
    return rows


def measured(path: Path) -> dict[tuple[int, int, str], float]:
    """Milliseconds per step from a report of `benchmarks.exchange`."""
    points = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 7 and re.fullmatch(r"[\d.]+", cells[3]):
            points[int(cells[0]), int(cells[1].replace(",", "")), cells[2]] = float(cells[3])
    return points


def features(dim: int, ranks: int, name: str) -> list[float]:
    """What time is linear in, where all ranks share the machine: rounds of messages, bytes moved by all, arithmetic."""
    moved = 2 * (ranks - 1) * 4 * dim / 1e6
    if name == "all-reduce":
        return [ranks, moved, 0.0]
    touched = ranks * 4 * dim * (1 + 0.5 * (3 + 1.25)) / 1e6  # mean; and for every pair, table and running sum
    return [2 * ranks, moved, touched]


def check(points: dict[tuple[int, int, str], float]) -> tuple[FloatArray, list[list[str]]]:
    """Fit to 2 and 4 ranks, compare with 8."""
    keys = [key for key in points if key[2] in ("all-reduce", "sharded")]
    known = [key for key in keys if key[0] < 8]
    matrix = np.array([features(dim, ranks, name) for ranks, dim, name in known])
    times = np.array([points[key] for key in known])
    # Relative errors count, not milliseconds.
    constants = np.linalg.lstsq(matrix / times[:, None], np.ones(len(known)), rcond=None)[0]
    rows = []
    for ranks, dim, name in keys:
        predicted = float(np.array(features(dim, ranks, name)) @ constants)
        found = points[ranks, dim, name]
        used = "fitted" if ranks < 8 else "predicted"
        rows.append(
            [name, str(ranks), f"{dim:,}", f"{found:.1f}", f"{predicted:.1f}", f"{predicted / found:.2f}", used]
        )
    return constants, rows


def main() -> None:
    """Print the check and the projection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    newest = sorted(report.RESULTS.glob("exchange_cpu_*.md"))
    parser.add_argument("path", type=Path, nargs="?", default=newest[-1] if newest else None)
    path = parser.parse_args().path
    if path is None or not path.exists():
        parser.error("there is no report of benchmarks.exchange; run that first, or name one")
    constants, rows = check(measured(path))
    print(f"Fitted to {path.name}: {constants[0]:.2f} ms per rank and round of messages,")
    print(f"{1 / constants[1]:.2f} GB/s moved between processes, {1 / constants[2]:.2f} GB/s in arithmetic.\n")
    print(report.table(["exchange", "ranks", "parameters", "measured ms", "model ms", "model / measured", ""], rows))
    print()
    header = ["parameters", "ranks", "all-reduce ms", "sharded / all-reduce", "largest extra", "bytes"]
    print(report.table(header, project(GPUS, [2.2e6, 124e6, 1.3e9, 7e9], [8, 64, 1024, 16384])))


if __name__ == "__main__":
    main()

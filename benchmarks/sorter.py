"""Microseconds per pair: the blocked sorter, the pair-at-a-time loop, and grab-sampler, in one run.

    python -m benchmarks.sorter [--rounds N]

`grab-sampler` is optional: pip install --no-deps grab-sampler overrides pandas absl-py tqdm python-dateutil pytz six
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import report
from cdgrab import Ordering
from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing.rules import Greedy
from cdgrab.balancing.sorter import SignSorter
from cdgrab.orders import Balanced

SHAPES = [(4, 19), (32, 5_569), (4, 1_081_792), (16, 62_006), (64, 62_006)]
TARGETS = {(4, 19): 30.0, (64, 62_006): 5.0}


def loop(rows_UWD: Tensor) -> list[int]:
    """The pair-at-a-time loop in PyTorch, without needless work: one buffer, one dot, one update for each pair."""
    num_turns, num_workers, dim = rows_UWD.shape
    running_sum, difference, signs = torch.zeros(dim), torch.empty(dim), []
    for turn in range(0, num_turns, 2):
        for worker in range(num_workers):
            torch.sub(rows_UWD[turn, worker], rows_UWD[turn + 1, worker], out=difference)
            sign = 1 if torch.dot(running_sum, difference).item() <= 0 else -1
            running_sum.add_(difference, alpha=sign)
            signs.append(sign)
    return signs


def blocked(sorter: SignSorter, rows_UWD: Tensor, *, fast: bool) -> npt.NDArray[np.int8]:
    """The library's sorter on the same rows, 1024 turns at a time."""
    sorter.start_epoch(0, np.full(rows_UWD.shape[1], rows_UWD.shape[0]))
    switch = compiled.available
    compiled.available = switch if fast else _never  # type: ignore[assignment]
    try:
        for some in rows_UWD.split(1024):
            sorter.add(some)
        sorter.close()
    finally:
        compiled.available = switch
    signs: npt.NDArray[np.int8] = sorter.decisions.joined().reshape(-1)
    return signs


def observed(ordering: Ordering, rows_UWD: Tensor) -> None:
    """The whole of `Ordering.observe`, one call for every step of all workers."""
    for rows_WD in rows_UWD:
        ordering.observe(rows_WD)


def grab_sampler(num_pairs: int, dim: int) -> Callable[[Tensor], None] | None:
    """PairBalance of the `grab-sampler` package. It knows one worker only: all rows go through it as one worker's."""
    # Its random projections, not used here, import torch_sparse, which must be compiled; an empty stand-in will do.
    stand_in = types.ModuleType("torch_sparse")
    stand_in.SparseTensor = None  # type: ignore[attr-defined]
    sys.modules.setdefault("torch_sparse", stand_in)
    try:
        from grabsampler.sorter.PairBalance import PairBalance
    except ImportError:
        return None

    def run(rows_UWD: Tensor) -> None:
        sorter = PairBalance(2 * num_pairs, dim, device="cpu")
        sorter._reset_epoch()
        for turn in range(0, rows_UWD.shape[0], 2):
            for worker in range(rows_UWD.shape[1]):
                sorter.single_step(rows_UWD[turn, worker])
                sorter.single_step(rows_UWD[turn + 1, worker])

    return run


def new_sorter(num_workers: int) -> SignSorter:
    """A sorter that lives through all rounds, as it does through training."""
    rngs = [np.random.default_rng(0)] * num_workers
    return SignSorter(Balanced("pair", coordinated=True), rngs, lambda _: Greedy())


def _never() -> bool:
    return False


def measure(num_workers: int, dim: int, rounds: int) -> list[str]:
    """One row of the table."""
    num_turns = max(8, min(2048, (1 << 23) // (num_workers * dim) // 2 * 2))
    rows_UWD = torch.randn(num_turns, num_workers, dim, generator=torch.Generator().manual_seed(0))
    num_pairs = num_turns // 2 * num_workers
    ordering = Ordering(num_turns * num_workers, batch_size=num_workers, unit_size=1, lanes=num_workers)
    plain, fast = new_sorter(num_workers), new_sorter(num_workers)
    contenders: dict[str, Callable[[], object]] = {
        "loop": lambda: loop(rows_UWD),
        "plain": lambda: blocked(plain, rows_UWD, fast=False),
        "observe": lambda: observed(ordering, rows_UWD),
        "read": lambda: rows_UWD.sum(),
    }
    if compiled.available():
        contenders["compiled"] = lambda: blocked(fast, rows_UWD, fast=True)
    rival = grab_sampler(num_pairs, dim)
    if rival is not None:
        contenders["grab-sampler"] = lambda: rival(rows_UWD)
    seconds = report.interleaved(contenders, rounds=rounds)

    def micros(name: str) -> str:
        return f"{np.median(seconds[name]) / num_pairs * 1e6:.3g}" if name in seconds else "not installed"

    def faster(name: str) -> str:
        return f"{report.ratio(seconds['loop'], seconds[name]):.2f}x" if name in seconds else ""

    agree = np.mean(np.array(loop(rows_UWD)) == blocked(fast, rows_UWD, fast=True))
    target = TARGETS.get((num_workers, dim))
    return [
        f"{num_workers} x {dim:,}",
        micros("loop"),
        micros("grab-sampler"),
        micros("plain"),
        micros("compiled"),
        micros("observe"),
        micros("read"),
        faster("plain"),
        faster("compiled"),
        f"{target:.0f}x" if target else "1x",
        f"{agree:.1%}",
    ]


def memory_growth(epochs: int = 100) -> str:
    """Resident memory after one epoch and after a hundred."""
    rows = torch.randn(32, 5_569, generator=torch.Generator().manual_seed(0))
    ordering = Ordering(32 * 16, batch_size=32, unit_size=1, lanes=32)

    def train(count: int) -> float:
        for _ in range(count * 16):
            ordering.observe(rows)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    before, after = train(10), train(epochs)
    return f"Resident memory after 10 epochs {before:.1f} MiB, after {10 + epochs} epochs {after:.1f} MiB."


def main() -> None:
    """Measure every shape and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which all contenders run")
    rounds = parser.parse_args().rounds
    rows = [measure(num_workers, dim, rounds) for num_workers, dim in SHAPES]
    header = [
        "workers x dim",
        "loop",
        "grab-sampler",
        "blocked, plain",
        "blocked, compiled",
        "Ordering.observe",
        "reading the rows",
        "plain vs loop",
        "compiled vs loop",
        "target",
        "same signs",
    ]
    body = "\n".join(
        [
            f"Microseconds per pair, median of {rounds} rounds; ratios are medians within a round, more is better.",
            "`loop` is the pair-at-a-time loop in PyTorch; `plain` needs PyTorch only, `compiled` the extra `fast`.",
            "`Ordering.observe` is everything, called once per step; `reading the rows` sums both rows of a pair, the",
            "least any method can do.",
            "",
            report.table(header, rows),
            "",
            "`plain` from 32,768 numbers on is the loop plus one more pass, for the length of every difference. It",
            "guards the running sum against rows that are not finite, and gives the `imbalance` metric; the loop has",
            "neither. With `fast` that pass costs nothing.",
            "",
            memory_growth(),
        ]
    )
    report.write("sorter", "The sorter against the pair-at-a-time loop", body)


if __name__ == "__main__":
    main()

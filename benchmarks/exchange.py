"""What coordination costs: plain all-reduce, the authors' all-gather and loop, and our exchanges, in one run.

    python -m benchmarks.exchange [--ranks 2 4 8] [--dims 62006 2200000 8000000] [--rounds N]

Ranks are processes on this machine that talk over gloo, one thread each. What is timed is everything from a local
gradient to the averaged one, balancing included; a pair comes every second step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.ranks import launch
from cdgrab import Ordering
from cdgrab.exchange import ShardedPairs
from cdgrab.sources.ddp import DdpAttachment, HookSlot

STEPS = 4  # of a contender in a round: two pairs
HUNGRY = ("authors", "gather", "server")  # some rank, or every rank, holds every gradient
MOST_GATHERED = 4 * 10**8  # numbers that all ranks together may gather in a step
CONTENDERS = ["all-reduce", "authors", "sharded", "gather", "server"]


class Bucket:
    """A bucket of one parameter, as DistributedDataParallel would hand it over."""

    def __init__(self, parameter: nn.Parameter, buffer: Tensor) -> None:
        self._parameter, self._buffer = parameter, buffer

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return [self._parameter]

    def gradients(self) -> list[Tensor]:
        return [self._buffer]

    def is_last(self) -> bool:
        return True


class Authors:
    """Every rank gathers every gradient and runs the loop; the average is taken from what was gathered."""

    def __init__(self, dim: int) -> None:
        self.size = dist.get_world_size()
        self.running_sum = torch.zeros(dim)
        self.held: Tensor | None = None
        self.numbers = (2 * self.size + 1) * dim

    def __call__(self, buffer: Tensor) -> None:
        rows = [torch.empty_like(buffer) for _ in range(self.size)]
        dist.all_gather(rows, buffer)
        gathered = torch.stack(rows)
        buffer.copy_(gathered.mean(0))
        if self.held is None:
            self.held = gathered
            return
        for first, second in zip(self.held, gathered, strict=True):
            difference = first - second
            sign = 1 if torch.dot(self.running_sum, difference).item() <= 0 else -1
            self.running_sum.add_(difference, alpha=sign)
        self.held = None


def contenders(dim: int, names: list[str]) -> dict[str, tuple[Callable[[Tensor], None], Any]]:
    """What each of them does with a local gradient, and what remembers its bytes and memory."""

    def all_reduce(buffer: Tensor) -> None:
        buffer.div_(dist.get_world_size())
        dist.all_reduce(buffer)

    made: dict[str, tuple[Callable[[Tensor], None], Any]] = {}
    made["all-reduce"] = (all_reduce, None)
    for name in names:
        if name == "all-reduce":
            continue
        if name in HUNGRY and dist.get_world_size() ** 2 * dim > MOST_GATHERED:
            continue
        if name == "authors":
            authors = Authors(dim)
            made[name] = (authors, authors)
            continue
        ordering = Ordering(10**6, batch_size=1, exchange=name)
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(dim))
        model = DistributedDataParallel(module)
        slot = HookSlot(dist.group.WORLD)
        attachment = DdpAttachment(ordering._epochs, model, slot, None, None)

        def hooked(
            buffer: Tensor, attachment: DdpAttachment = attachment, weight: nn.Parameter = module.weight
        ) -> None:
            bucket: Any = Bucket(weight, buffer)
            attachment(bucket).wait()
            attachment.settle()

        made[name] = (hooked, ordering)
    return made


def bytes_sent(owner: Any) -> int:
    """So far, by what the contender's ordering counts."""
    return owner._epochs.bytes_sent if isinstance(owner, Ordering) else 0


def held_numbers(owner: Any, dim: int) -> float:
    """Numbers kept from one step to the next for ordering, per parameter."""
    if owner is None:
        return 0.0
    if isinstance(owner, Authors):
        return owner.numbers / dim
    sorter = owner._epochs.intake.sorter
    if isinstance(sorter, ShardedPairs):
        parts = [part for stored in sorter.store.values() for part in (stored.rows_Lc, stored.running_sum_c)]
    else:
        centring, balancer = sorter._centring, sorter._balancers[0]
        parts = [centring._buffer_LD, balancer.running_sum, balancer.scratch, sorter._buffer_VLD]
    return sum(part.numel() for part in parts) / dim


def on_a_rank(dims: list[int], names: list[str], rounds: int) -> Iterator[tuple[int, Any, Any, Any]]:
    """Seconds, bytes and memory of every contender."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dim in dims:
        made = contenders(dim, names)
        gradient = torch.randn(dim, generator=torch.Generator().manual_seed(rank))
        buffer = torch.empty(dim)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        sent = {name: 0.0 for name in made}
        for turn in range(rounds + 1):
            first = turn % len(made)
            for name in [*made][first:] + [*made][:first]:
                step, owner = made[name]
                before = bytes_sent(owner)
                elapsed = 0.0
                for _ in range(STEPS):
                    buffer.copy_(gradient).mul_(torch.rand(()))
                    dist.barrier()
                    start = time.perf_counter()
                    step(buffer)
                    dist.barrier()
                    elapsed += time.perf_counter() - start
                sent[name] = (bytes_sent(owner) - before) / STEPS
                if turn:  # the first round warms up
                    seconds[name].append(elapsed / STEPS)
        if rank == 0:
            ring = 2 * (size - 1) / size * dim * 4
            sent |= {"all-reduce": ring, "authors": (size - 1) * dim * 4.0}
            sent["server"] = 4.0 * dim  # rank 0, which counts here, only receives; this is what the others send
            for name in {"gather", "server"} & made.keys():
                sent[name] += ring  # their averages come from an all-reduce beside it
            memory = {name: held_numbers(owner, dim) for name, (_, owner) in made.items()}
            yield dim, seconds, {name: value / ring for name, value in sent.items()}, memory
        del made


def measure(size: int, dims: list[int], names: list[str], rounds: int) -> list[list[str]]:
    """Rows of the table for `size` ranks."""
    rows = []
    for dim, seconds, sent, memory in launch(on_a_rank, size, dims, names, rounds):
        for name in names:
            if name not in memory:
                rows.append([str(size), f"{dim:,}", name, "not run: too little memory", "", "", ""])
                continue
            ratio = statistics.median(
                mine / plain for mine, plain in zip(seconds[name], seconds["all-reduce"], strict=True)
            )
            rows.append(
                [
                    str(size),
                    f"{dim:,}",
                    name,
                    f"{statistics.median(seconds[name]) * 1e3:.1f}",
                    f"{ratio:.2f}x",
                    f"{sent[name]:.3f}x",
                    f"{memory[name]:.2f}",
                ]
            )
        print("\n".join(" ".join(row) for row in rows[-len(names) :]), flush=True)
    return rows


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--dims", type=int, nargs="+", default=[62_006, 2_200_000, 8_000_000])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    rows = [row for size in options.ranks for row in measure(size, options.dims, options.contenders, options.rounds)]
    header = ["ranks", "parameters", "exchange", "ms per step", "vs all-reduce", "bytes sent", "numbers kept / dim"]
    body = (
        f"Milliseconds per step (median of {options.rounds} rounds of {STEPS} steps, ratios within a round) "
        "from a local gradient to the average everywhere, balancing included. Bytes sent per rank relative to a ring "
        "all-reduce. Numbers kept from step to step for ordering, per parameter. `authors` gathers every gradient and "
        "runs the pair-at-a-time loop; `gather` and `server` average with an all-reduce "
        "beside it."
        "\n\n" + report.table(header, rows)
    )
    report.write("exchange", "The price of coordination", body)


if __name__ == "__main__":
    main()

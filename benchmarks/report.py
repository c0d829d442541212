"""What every benchmark shares: fair timing, and a report that says how it was made."""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch

import cdgrab

RESULTS = Path(__file__).parent / "results"


def interleaved(contenders: dict[str, Callable[[], object]], *, rounds: int = 15) -> dict[str, list[float]]:
    """Seconds of every contender in every round; all of them run in each round, so that they share its noise.

    In a round a contender runs once untimed, because the one before leaves caches and idling threads behind, and then
    as often as fills a twentieth of a second: what counts is a run in the middle of training.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    calls: dict[str, int] = {}
    for name, contender in contenders.items():
        contender()  # compilation, allocation
        start = time.perf_counter()
        contender()
        calls[name] = max(1, math.ceil(0.05 / (time.perf_counter() - start)))
    names = list(contenders)
    for turn in range(rounds):
        # Rotated, so that nobody always runs after the same neighbour.
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            contender = contenders[name]
            contender()
            start = time.perf_counter()
            for _ in range(calls[name]):
                contender()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return seconds


def ratio(rival: list[float], mine: list[float]) -> float:
    """How many times faster `mine` is: the median over rounds of the ratio within a round."""
    return statistics.median(theirs / ours for theirs, ours in zip(rival, mine, strict=True))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def hardware() -> str:
    """The processor, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def write(name: str, title: str, body: str, data: str = "Random data") -> Path:
    """Write a report under `benchmarks/results/` and print it."""
    module = Path(sys.argv[0]).resolve().relative_to(Path.cwd()).with_suffix("").as_posix().replace("/", ".")
    # Where data lie is nobody else's business.
    hidden = {"--data": "DIR", "--before": "SRC"}
    arguments = [hidden.get(before, this) for before, this in itertools.pairwise(sys.argv)]
    how = (
        f"Command: `{' '.join(['python -m', module, *arguments])}`. {hardware()}, {torch.get_num_threads()} threads. "
        f"cdgrab {cdgrab.__version__}, torch {torch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}. {date.today().isoformat()}. Seed 0. {data}."
    )
    text = f"# {title}\n\n{how}\n\n{body}\n"
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    path = RESULTS / f"{name}_{kind}_{date.today().isoformat()}.md"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(text)
    print(text)
    print(f"Written to {path}")
    return path

"""How much of what exact ordering gains do sketches keep? Training runs, paired by seed, on seven small tasks.

    python -m benchmarks.sketch_quality --data DIR [--tasks softmax lenet ...] [--before SRC]
    python -m benchmarks.sketch_quality --report

`DIR` has the public data files (`cdgrab data` says which). `SRC` is the `src` folder of a checkout whose sketches are
compared too (commit f25ed79 for those of before; `git worktree add` makes one). Every run is kept in
`benchmarks/results/sketch_quality.jsonl` as soon as it is done, and runs that are there are not repeated. `--report`
writes the table and the figure from what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import report

RECORDS = Path(__file__).parent / "results" / "sketch_quality.jsonl"
FIGURE = Path(__file__).parents[1] / "docs" / "sketches.png"
LENGTHS = (64, 128, 256, 512, 1024)
LONGER = 4096
GAUSSIAN = ("gaussian-256", "gaussian-1024")
ASKED_FOR = {f"sketch-{LONGER}", *GAUSSIAN}  # with --contenders, and not by default: they take long
SEEDS = 5
# 97.5 % quantiles of Student's distribution, from one degree of freedom on.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
STUDENT += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064]


def contenders(before: bool) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Order and options of `attach`, by name."""
    if before:
        return {
            f"{kind}-{length}": ("cd-grab", {"source": "sketch", "length": length, "fitted": kind == "fitted"})
            for kind in ("kronecker", "fitted")
            for length in (256, 1024)
        }
    sketches: dict[str, tuple[str, dict[str, Any] | None]] = {
        f"sketch-{length}": ("cd-grab", {"source": "sketch", "length": length}) for length in (*LENGTHS, LONGER)
    }
    rivals: dict[str, tuple[str, dict[str, Any] | None]] = {
        name: ("cd-grab", {"gaussian": int(name.partition("-")[2])}) for name in GAUSSIAN
    }
    return {"rr": ("rr", None), "exact": ("cd-grab", {"source": "per_example"}), **sketches, **rivals}


class Run(NamedTuple):
    """One training run."""

    task: str
    contender: str
    seed: int


def train(run: Run, data: Path, before: bool) -> dict[str, Any]:
    """The record of a run, in this process."""
    import torch

    import cdgrab
    from benchmarks.sketch_tasks import TASKS, losses

    torch.set_num_threads(1)
    task, (order, attach) = TASKS[run.task], contenders(before)[run.contender]
    start = time.perf_counter()
    found = list(losses(task, data, run.seed, order, attach))
    settings = {"epochs": task.epochs, "last": task.last, "batch": task.batch, "lr": task.lr}
    versions = {"cdgrab": cdgrab.__version__, "torch": torch.__version__, "hardware": report.hardware()}
    seconds = round(time.perf_counter() - start, 1)
    return {**run._asdict(), "losses": found, "seconds": seconds, **settings, **versions}


def start(task: str, seed: int, names: list[str], data: Path, before: Path | None) -> Iterator[str]:
    """Train in a process of its own, with the library it is about; the records come as lines."""
    here = Path(__file__).parents[1]
    library = here / "src" if before is None else before
    environment = {**os.environ, "PYTHONPATH": f"{library}:{here}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.sketch_quality", "--data", str(data), "--tasks", task]
    command += ["--one", str(seed), "--contenders", *names]
    if before is not None:
        command += ["--before", str(before)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (line for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise RuntimeError(f"{task} with seed {seed} failed")


def known() -> dict[Run, dict[str, Any]]:
    """Records that are there."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    records = [json.loads(line) for line in lines]
    return {Run(record["task"], record["contender"], record["seed"]): record for record in records}


class Share(NamedTuple):
    """What is kept of the exact gain, with its interval."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.2f} ({self.low:.2f} to {self.high:.2f})"


def share_of(gains: list[float], exact: list[float]) -> Share:
    """The ratio of the means of paired gains, and its 95 % interval (delta method, Student's quantile)."""
    share = fmean(gains) / fmean(exact)
    misses = [gain - share * whole for gain, whole in zip(gains, exact, strict=True)]
    error = math.sqrt(sum(miss**2 for miss in misses) / (len(misses) - 1) / len(misses)) / abs(fmean(exact))
    reach = STUDENT[len(misses) - 2] * error
    return Share(share, share - reach, share + reach)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval."""
    mean = fmean(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, STUDENT[len(values) - 2] * deviation / math.sqrt(len(values))


def final(record: Mapping[str, Any]) -> float:
    """The loss at the end, averaged over some epochs."""
    return fmean(record["losses"][-record["last"] :])


def reached(record: Mapping[str, Any], loss: float) -> float:
    """Epochs until the loss is that, between two epochs on the line between their losses."""
    before = math.inf
    for epoch, found in enumerate(record["losses"], start=1):
        if found <= loss:
            return epoch if math.isinf(before) else epoch - (loss - found) / (before - found)
        before = found
    return float(len(record["losses"]))


def summary() -> tuple[list[str], list[list[str]], dict[str, dict[str, Share]], list[str]]:
    """Table, shares by task and contender, and notes."""
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for run, record in known().items():
        found[run.task][run.contender][run.seed] = record
    names = [f"sketch-{length}" for length in (*LENGTHS, LONGER)]
    names += [*GAUSSIAN, *(f"{kind}-{length}" for kind in ("kronecker", "fitted") for length in (256, 1024))]
    rows: list[list[str]] = []
    shares: dict[str, dict[str, Share]] = {}
    notes: list[str] = []
    for task, runs in found.items():
        seeds = sorted(runs["rr"].keys() & runs["exact"].keys())
        if len(seeds) < SEEDS:
            continue
        gain = {seed: final(runs["rr"][seed]) - final(runs["exact"][seed]) for seed in seeds}
        mean, reach = interval(list(gain.values()))
        counts = mean > reach
        if not counts:
            notes.append(f"{task}: the exact gain is smaller than its own interval, so its shares do not count.")
        sooner = [reached(runs["exact"][s], runs["rr"][s]["losses"][-1]) / runs["rr"][s]["epochs"] for s in seeds]
        row = [task, str(len(seeds)), f"{mean:.5f} ± {reach:.5f}", f"{fmean(sooner):.2f}"]
        shares[task] = {}
        for name in names:
            mine = [seed for seed in seeds if seed in runs[name]]  # all, or the first of them
            if len(mine) < SEEDS:
                row.append("")
                continue
            gains = [final(runs["rr"][seed]) - final(runs[name][seed]) for seed in mine]
            share = share_of(gains, [gain[seed] for seed in mine])
            row.append(str(share) if counts else f"[{share}]")
            if counts:
                shares[task][name] = share
        rows.append(row)
    return ["task", "seeds", "exact gain in loss", "epochs to `rr`'s loss, share", *names], rows, shares, notes


def draw(shares: dict[str, dict[str, Share]], path: Path) -> None:
    """Share of the exact gain against the length of the sketch."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.6))
    axes.axhline(1.0, color="#888888", linewidth=1.0)
    axes.axhline(0.95, color="#888888", linewidth=1.0, linestyle=":")
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
    for number, ((task, by_name), colour) in enumerate(zip(shares.items(), colours, strict=False)):
        lengths = [length for length in (*LENGTHS, LONGER) if f"sketch-{length}" in by_name]
        found = [by_name[f"sketch-{length}"] for length in lengths]
        x = [length * 1.04 ** (number - 3) for length in lengths]
        errors = [[one.share - one.low for one in found], [one.high - one.share for one in found]]
        middle = [one.share for one in found]
        axes.errorbar(x, middle, errors, color=colour, label=task, marker="o", markersize=4, linewidth=1.2, capsize=2)
        for kind, marker in (("kronecker", "x"), ("fitted", "+")):
            old = [
                (length, by_name[f"{kind}-{length}"].share) for length in (256, 1024) if f"{kind}-{length}" in by_name
            ]
            place = 1.04 ** (number - 3)
            axes.plot([a * place for a, _ in old], [b for _, b in old], marker, color=colour, markersize=7, alpha=0.6)
    axes.plot([], [], "x", color="#555555", label="before: random")
    axes.plot([], [], "+", color="#555555", label="before: fitted")
    axes.set_xscale("log", base=2)
    drawn = [n for n in (*LENGTHS, LONGER) if any(f"sketch-{n}" in by_name for by_name in shares.values())]
    axes.set_xticks(drawn, [f"{length:,}" for length in drawn])
    axes.set(xlabel="numbers in a sketch", ylabel="share of the exact gain over random reshuffling", ylim=(-0.2, 1.6))
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train what is missing, or report."""
    from benchmarks.sketch_tasks import TASKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--contenders", nargs="+", help="by default all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--before", type=Path, help="the src folder of an older checkout, whose sketches are trained")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        for name in options.contenders:
            run = Run(options.tasks[0], name, options.one)
            print(json.dumps(train(run, options.data, options.before is not None)), flush=True)
        return
    if not options.report:
        every = [name for name in contenders(options.before is not None) if name not in ASKED_FOR]
        names = options.contenders or every
        there = known()
        with ThreadPoolExecutor(options.jobs) as pool, RECORDS.open("a") as records:

            def keep(task: str, seed: int, missing: list[str]) -> None:
                for line in start(task, seed, missing, options.data, options.before):
                    records.write(line)
                    records.flush()
                    done = json.loads(line)
                    print(task, done["contender"], seed, f"{final(done):.5f}", f"{done['seconds']} s", flush=True)

            jobs = []
            for task, seed in itertools.product(options.tasks, range(options.seeds)):
                missing = [name for name in names if Run(task, name, seed) not in there]
                if missing:
                    jobs.append(pool.submit(keep, task, seed, missing))
            for job in jobs:
                job.result()
        return
    header, rows, shares, notes = summary()
    draw(shares, FIGURE)
    body = (
        "Share of the gain in final loss over `rr` that exact ordering has, with its 95 % interval over paired seeds. "
        "`sketch-N` are the sketches of this version with N numbers; `kronecker-N` and `fitted-N` those of commit "
        "f25ed79, random and fitted to the data. In brackets where the exact gain is smaller than its own interval: "
        "such a share says nothing.\n\n" + report.table(header, rows) + "\n\n" + "\n".join(f"- {n}" for n in notes)
    )
    report.write("sketch_quality", "What sketches keep of the exact gain", body, "Public data sets, see the tasks")


if __name__ == "__main__":
    main()

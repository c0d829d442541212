"""What a sketch of a gradient gives up: LeNet on CIFAR-10 with single examples ordered exactly, by sketches, or not.

    python -m benchmarks.quality --data DIR [--epochs 10] [--seeds 2] [--jobs 2]

`DIR` holds CIFAR-10 in its binary version (`cifar-10-batches-bin/data_batch_1.bin` and so on). 64 simulated workers
with one example each, SGD with step 3e-3 and momentum 0.9. Runs that are there already are not repeated. The loss is
that of the whole training set after the epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import report
from benchmarks.per_example import Lenet
from cdgrab import Ordering, World

RECORDS = Path("results/quality")
FIGURE = Path("docs/per_example.png")
LENGTHS = [4096, 1024, 256]
WAYS = [
    "rr",
    "ghost",
    *(f"{kind} sketch of {length}" for kind in ("fitted", "random") for length in LENGTHS),
]


def load(folder: Path, files: list[str]) -> tuple[Tensor, Tensor]:
    """Images, normalised, and labels."""
    raw = []
    for name in files:
        path = folder / "cifar-10-batches-bin" / name
        if not path.exists():
            raise SystemExit(f"{path} is missing: --data names the folder that holds cifar-10-batches-bin")
        raw.append(np.fromfile(path, dtype=np.uint8).reshape(-1, 3073))
    joined = torch.from_numpy(np.concatenate(raw))
    images = joined[:, 1:].float().view(-1, 3, 32, 32) / 255
    return (images - 0.5) / 0.25, joined[:, 0].long()


def run(way: str, seed: int, epochs: int, folder: Path) -> None:
    """One run; its file appears when it is complete."""
    torch.set_num_threads(1)
    x, y = load(folder, [f"data_batch_{number}.bin" for number in range(1, 6)])
    x_test, y_test = load(folder, ["test_batch.bin"])
    torch.manual_seed(seed)
    model = Lenet()
    ordering = Ordering(
        len(x),
        batch_size=64,
        unit_size=1,
        order="rr" if way == "rr" else "cd-grab",
        world=World.simulated(64),
        seed=seed,
    )
    if way == "ghost":
        ordering.attach(model, source="ghost")
    elif way != "rr":
        kind, *_, length = way.split()
        ordering.attach(model, source="sketch", length=int(length), fitted=kind == "fitted")
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    records: list[dict[str, Any]] = []
    seconds = 0.0
    for epoch in range(epochs):
        ordering.sampler.set_epoch(epoch)
        start = time.perf_counter()
        for batch in torch.tensor(list(ordering.sampler)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        seconds += time.perf_counter() - start
        with torch.no_grad():
            loss = sum(float(cross_entropy(model(a), b, reduction="sum")) for a, b in _chunks(x, y)) / len(x)
            right = sum(int((model(a).argmax(1) == b).sum()) for a, b in _chunks(x_test, y_test))
        metrics = ordering.metrics()
        records.append(
            {
                "way": way,
                "seed": seed,
                "epoch": epoch + 1,
                "loss": loss,
                "accuracy": right / len(x_test),
                "seconds": seconds,
                "imbalance": metrics.get("imbalance"),
            }
        )
    path = _path(way, seed, epochs)
    path.with_suffix(".partial").write_text("\n".join(json.dumps(record) for record in records) + "\n")
    path.with_suffix(".partial").replace(path)


def _path(way: str, seed: int, epochs: int) -> Path:
    return RECORDS / f"{way.replace(' ', '-')}_seed{seed}_epochs{epochs}.jsonl"


def _chunks(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(2000), y.split(2000), strict=True))


def draw(runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Loss relative to random reshuffling, against epochs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    base = np.array([[record["loss"] for record in run] for run in runs["rr"]])  # of the same seed
    epochs = np.arange(1, base.shape[1] + 1)
    greys = {4096: "#1b4f72", 1024: "#2e86c1", 256: "#85c1e9"}
    for axis, kind in zip(axes, ("fitted", "random"), strict=True):
        axis.axhline(0, color="#888888", linewidth=1.2, label="random reshuffling")
        for way, colour in [("ghost", "#D55E00"), *((f"{kind} sketch of {n}", greys[n]) for n in LENGTHS)]:
            losses = np.array([[record["loss"] for record in run] for run in runs[way]])
            losses = losses - base[: len(losses)]
            axis.plot(epochs, losses.mean(0), color=colour, label="exact (ghost)" if way == "ghost" else way)
            axis.fill_between(epochs, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=f"{kind} projections", xlabel="epochs")
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    axes[0].set_ylabel("training loss minus that of random reshuffling")
    figure.suptitle("LeNet on CIFAR-10 (JPEG re-coded), 64 workers, one example each; range over seeds", fontsize=11)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=88)
    plt.close(figure)


def main() -> None:
    """Run what is missing, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; 0: only report what is there")
    options = parser.parse_args()
    load(options.data, ["test_batch.bin"])
    RECORDS.mkdir(parents=True, exist_ok=True)
    wanted = [(way, seed) for seed in range(options.seeds) for way in WAYS]
    missing = [(way, seed) for way, seed in wanted if not _path(way, seed, options.epochs).exists()]
    missing = missing if options.jobs else []  # only the report
    with ProcessPoolExecutor(max(1, options.jobs)) as pool:
        jobs = [pool.submit(run, way, seed, options.epochs, options.data) for way, seed in missing]
        for (way, seed), job in zip(missing, jobs, strict=True):
            job.result()
            print(f"{way}, seed {seed}: done", flush=True)
    runs: dict[str, list[list[dict[str, Any]]]] = {
        way: [
            [json.loads(line) for line in _path(way, seed, options.epochs).read_text().splitlines()]
            for seed in range(options.seeds)
            if _path(way, seed, options.epochs).exists()
        ]
        for way in WAYS
    }
    rows = []
    for way, seeds in runs.items():
        last = [run[-1] for run in seeds]
        half = [run[len(run) // 2 - 1]["loss"] for run in seeds]
        rows.append(
            [
                way,
                " / ".join(f"{loss:.3f}" for loss in half),
                " / ".join(f"{record['loss']:.3f}" for record in last),
                " / ".join(f"{record['accuracy']:.1%}" for record in last),
                "" if last[0]["imbalance"] is None else f"{statistics.mean(r['imbalance'] for r in last):.3f}",
            ]
        )
    header = [
        "gradients",
        f"loss at {options.epochs // 2}",
        f"loss at {options.epochs}",
        "test accuracy",
        "imbalance",
    ]
    body = (
        "LeNet on CIFAR-10 (JPEG re-coded, not pixel-exact), 64 simulated workers with one example each, SGD with "
        f"step 3e-3 and momentum 0.9, {options.epochs} epochs, seeds 0 to {options.seeds - 1} side by side. Loss of "
        "the whole training set. `imbalance` is that of the short rows themselves, in the last epoch.\n\n"
        + report.table(header, rows)
    )
    draw(runs)
    report.write("quality", "What a sketch of a gradient gives up", body)


if __name__ == "__main__":
    main()

"""The README's loop on digits: `Ordering` and `attach` with nothing else, beside `DataLoader(shuffle=True)`.

    python -m benchmarks.default [--seeds N] [--epochs N]

An ordinary loop with a loader, in one process. Runs of a seed start from the same parameters and take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cdgrab
from benchmarks import report
from benchmarks.sketch_quality import interval

BATCH, DECAY = 16, 1e-3
LAST = 5  # epochs over which the loss is averaged
MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "softmax regression": (lambda: nn.Linear(64, 10), 0.5),
    "MLP, 64 hidden units": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 0.1),
}


def digits() -> TensorDataset:
    """1,797 images of 8 x 8."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))


def objective(model: nn.Module, data: TensorDataset) -> Tensor:
    """The loss over all data, with weight decay."""
    x, y = data.tensors
    dtype = next(model.parameters()).dtype
    decay = sum((p.square().sum() for p in model.parameters()), torch.zeros((), dtype=dtype))
    return cross_entropy(model(x.to(dtype)), y) + DECAY / 2 * decay


def minimum(data: TensorDataset) -> float:
    """Of the softmax regression's objective."""
    model = nn.Linear(64, 10).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(model, data)
        loss.backward()
        return loss

    optimizer.step(closure)
    return objective(model, data).item()


def train(name: str, data: TensorDataset, seed: int, epochs: int, *, ordered: bool) -> tuple[list[float], float]:
    """The loss over all data after every epoch, and the seconds of all steps."""
    make, lr = MODELS[name]
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=DECAY)
    if ordered:
        ordering = cdgrab.Ordering(data, batch_size=BATCH, seed=seed)
        loader = DataLoader(data, batch_size=BATCH, sampler=ordering.sampler)
        ordering.attach(model)
    else:
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    losses, seconds = [], 0.0
    for _ in range(epochs):
        start = time.perf_counter()
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds += time.perf_counter() - start
        with torch.no_grad():
            losses.append(float(objective(model, data)))
    return losses, seconds


def main() -> None:
    """Train both ways and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = digits(), []
    for name in MODELS:
        least = minimum(data) if name.startswith("softmax") else 0.0
        ends: list[tuple[float, float]] = []
        sooner, slower = [], []
        for seed in range(options.seeds):
            usual, usual_seconds = train(name, data, seed, options.epochs, ordered=False)
            ours, seconds = train(name, data, seed, options.epochs, ordered=True)
            end = fmean(usual[-LAST:])
            ends.append((end - least, fmean(ours[-LAST:]) - least))
            reached = (n for n, loss in enumerate(ours, 1) if loss <= end)
            sooner.append(next(reached, options.epochs) / options.epochs)
            slower.append(seconds / usual_seconds)
        gain, reach = interval([usual - ours for usual, ours in ends])
        rows.append(
            [
                name,
                f"{fmean(usual for usual, _ in ends):.5f}",
                f"{fmean(ours for _, ours in ends):.5f}",
                f"{gain:.5f} ± {reach:.5f}",
                f"{fmean(sooner):.2f}",
                f"{fmean(slower):.2f}x",
            ]
        )
    header = ["model", "shuffled", "cdgrab", "gain", "epochs to the shuffled loss, share", "seconds of an epoch"]
    body = (
        f"Loss over the 1,797 images after {options.epochs} epochs (mean of the last {LAST}), of the softmax "
        f"regression above its minimum. Batches of {BATCH}, weight decay {DECAY}, means over {options.seeds} seeds; "
        "the gain with its 95 % interval over paired seeds. A step takes about a tenth of a millisecond here, so that "
        "seconds show the most that ordering can cost.\n\n" + report.table(header, rows)
    )
    report.write("default", "The default beside DataLoader(shuffle=True)", body, "sklearn's digits")


if __name__ == "__main__":
    main()

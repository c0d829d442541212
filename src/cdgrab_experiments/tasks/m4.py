"""M4 Weekly with an autoregressive network: 20 values in, the next out, and six times over on its own predictions."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments import compiled, data
from cdgrab_experiments.tasks import m4_compiled
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import device_of, seeded

INPUTS, STEPS, STRIDE, WIDTH = 20, 6, 3, 64
HORIZON = 13
# A tenth of the windows is not trained on. They are drawn once and for all, not by the seed of a run, so that all runs
# train on the same ones. Windows overlap their neighbours, so these are no independent test; the test horizon is.
VALIDATION_SHARE, SPLIT_SEED = 0.1, 0


class Autoregressive(nn.Module):
    """A network 20-64-64-1 (dim 5,569) whose every prediction becomes the last of its next inputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.first = nn.Linear(INPUTS, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, steps: int = STEPS) -> Tensor:
        """From `N x 20` to the next `N x steps`."""
        for _ in range(steps):
            hidden = torch.relu(self.second(torch.relu(self.first(x[:, -INPUTS:]))))
            x = torch.cat([x, self.last(hidden)], 1)
        return x[:, -steps:]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error, of standardised values."""
    return F.mse_loss(model(x), y)


class _Pass(NamedTuple):
    """A forward and a backward pass of all windows, through their own predictions, by hand.

    It takes half of what automatic differentiation takes: nothing is recorded on the way.
    """

    values: Tensor  # inputs, then predictions: step t has seen the 20 values from t on
    first_TNh: Tensor
    second_TNh: Tensor
    d_first_TNh: Tensor
    d_second_TNh: Tensor
    d_out_NT: Tensor


def _passed(model: Autoregressive, x: Tensor, y: Tensor) -> _Pass:
    w1, b1, w2, b2, w3, b3 = (p.detach() for p in model.parameters())
    steps, num = y.shape[1], len(x)
    values = torch.cat([x, y], 1)  # what is true gives way to what is predicted
    first_TNh, second_TNh, d_first_TNh, d_second_TNh = x.new_empty(4, steps, num, WIDTH).unbind()
    firsts, seconds, d_firsts, d_seconds = (
        table.unbind() for table in (first_TNh, second_TNh, d_first_TNh, d_second_TNh)
    )
    for t in range(steps):
        torch.addmm(b1, values[:, t : t + INPUTS], w1.T, out=firsts[t]).relu_()
        torch.addmm(b2, firsts[t], w2.T, out=seconds[t]).relu_()
        torch.addmm(b3, seconds[t], w3.T, out=values[:, t + INPUTS : t + INPUTS + 1])
    # Of the predictions: their own share of the loss, to which later steps add.
    d_out = (values[:, INPUTS:] - y).mul_(2 / steps)
    for t in reversed(range(steps)):
        torch.mul(d_out[:, t : t + 1], w3, out=d_seconds[t]).mul_(seconds[t].sign())
        torch.mm(d_seconds[t], w2, out=d_firsts[t]).mul_(firsts[t].sign())
        if t:  # of its inputs the last t are predictions
            d_out[:, :t].addmm_(d_firsts[t], w1[:, INPUTS - t :])
    return _Pass(values, first_TNh, second_TNh, d_first_TNh, d_second_TNh, d_out)


def gradient(model: Autoregressive, x: Tensor, y: Tensor, rows: Tensor | None = None) -> Tensor:
    """Of all windows, one product for every weight; of each of them, a batched one, or a compiled loop on a CPU."""
    done, steps = _passed(model, x, y), y.shape[1]
    if rows is not None and _takes_compiled(rows, steps):
        mean = rows.new_empty(rows.shape[1])
        m4_compiled.write_rows(done, rows, mean)
        return mean
    # Copied: products of overlapping windows would take four times as long.
    windows = done.values.unfold(1, INPUTS, 1)[:, :steps].contiguous()
    if rows is not None:
        parts = [
            torch.bmm(done.d_first_TNh.permute(1, 2, 0), windows).flatten(1),
            done.d_first_TNh.sum(0),
            torch.bmm(done.d_second_TNh.permute(1, 2, 0), done.first_TNh.transpose(0, 1)).flatten(1),
            done.d_second_TNh.sum(0),
            (done.second_TNh * done.d_out_NT.T[:, :, None]).sum(0),
            done.d_out_NT.sum(1, keepdim=True),
        ]
        return torch.cat(parts, 1, out=rows).mean(0)
    first, second, d_first, d_second = (
        table.flatten(0, 1) for table in (done.first_TNh, done.second_TNh, done.d_first_TNh, done.d_second_TNh)
    )
    d_out = done.d_out_NT.T.flatten()
    parts = [
        (d_first.T @ windows.transpose(0, 1).flatten(0, 1)).flatten(),
        d_first.sum(0),
        (d_second.T @ first).flatten(),
        d_second.sum(0),
        second.T @ d_out,
        d_out.sum(0, keepdim=True),
    ]
    return torch.cat(parts).div_(len(x))


def _takes_compiled(rows: Tensor, steps: int) -> bool:
    return compiled.available() and not rows.is_cuda and rows.is_contiguous() and steps == m4_compiled.STEPS


def smape(predicted: Tensor, true: Tensor) -> float:
    """Symmetric mean absolute percentage error, in per cent, as in the M4 competition."""
    return float((200 * (predicted - true).abs() / (predicted.abs() + true.abs())).mean())


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Every series is standardised by its own mean and deviation; the metric is in original units."""
    found = data.find("m4-weekly", folder)
    series, future = _read(found, "Weekly-train.csv"), _read(found, "Weekly-test.csv")
    if series.keys() != future.keys() or {len(values) for values in future.values()} != {HORIZON}:
        raise found.damaged("Weekly-test.csv", f"does not go on {HORIZON} weeks for the {len(series)} series")
    windows, last, means, deviations = [], [], [], []
    for name, values in series.items():
        if len(values) < INPUTS + STEPS:
            raise found.damaged("Weekly-train.csv", f"has only {len(values)} values of {name}")
        mean, deviation = values.mean(), values.std() or 1.0
        standardised = (values - mean) / deviation
        windows.append(np.lib.stride_tricks.sliding_window_view(standardised, INPUTS + STEPS)[::STRIDE])
        last.append(standardised[-INPUTS:])
        means.append(mean)
        deviations.append(deviation)
    all_windows = torch.tensor(np.concatenate(windows), dtype=torch.float32)
    order = torch.randperm(len(all_windows), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held, kept = order.split([int(VALIDATION_SHARE * len(order)), len(order) - int(VALIDATION_SHARE * len(order))])
    train, validation = all_windows[kept.sort().values], all_windows[held]
    inputs = torch.tensor(np.stack(last), dtype=torch.float32)
    true = torch.tensor(np.stack([future[name] for name in series]))
    mean_N1, deviation_N1 = torch.tensor(means)[:, None], torch.tensor(deviations)[:, None]

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = device_of(model)
        with torch.no_grad():
            forecast = model(inputs.to(device), HORIZON).cpu().double() * deviation_N1 + mean_N1
            x, y = validation.to(device).split([INPUTS, STEPS], 1)
            return {"smape": smape(forecast, true), "validation_mse": float(loss(model, x, y))}

    return Problem(
        model=Autoregressive(seed),
        train=(train[:, :INPUTS].contiguous(), train[:, INPUTS:].contiguous()),
        loss=loss,
        evaluate=evaluate,
        metric="smape",
        higher_is_better=False,
        data=f"M4 Weekly: {len(train):,} / {len(validation):,} windows of {len(series)} series; test horizon {HORIZON}"
        f"{found.note}",
        gradient=gradient,
    )


def _read(found: data.Found, name: str) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Series by name; lines are padded with empty cells at the end."""
    lines = list(csv.reader(found.text(name).splitlines()))
    if len(lines) < 2:
        raise found.damaged(name, "has no series in it")
    series = {}
    for number, (label, *cells) in enumerate(lines[1:], start=2):
        try:
            series[label] = np.array([float(cell) for cell in cells if cell and cell != "NA"])
        except ValueError as error:
            raise found.damaged(name, f"is no table of numbers in line {number} ({error})") from error
    return series


TASK = Task(
    name="m4",
    title="M4 Weekly, autoregressive MLP",
    settings=Settings(workers=4, batch_size=16, epochs=30, lr=1e-3, momentum=0.9, schedule="step:10:0.25"),
    load=load,
    needs=("m4-weekly",),
)

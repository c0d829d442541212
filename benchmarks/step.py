"""What a training step under DistributedDataParallel costs with ordering attached, against the same step without.

    python -m benchmarks.step [--ranks 2 4] [--models lenet ...] [--kinds plain batch sketch per_example] [--rounds N]

Forward, backward, averaging and the optimizer's step; a unit is a rank's batch, or an example. All models live in the
same ranks and take turns, so that they share the machine's noise. `per_example` only if it is asked for: its rows are
large.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.per_example import Lenet
from benchmarks.ranks import launch
from cdgrab import Ordering

STEPS = 4  # of a model in a round: two pairs
MODELS = ["transformer", "mlp", "small-mlp", "lenet"]
KINDS = ["plain", "batch", "sketch"]
ROWS = "per_example"


class Seconds(NamedTuple):
    """Of a kind of step."""

    of_rounds: list[float]  # per step
    sent: int  # bytes per step, by this rank, for ordering


class Transformer(nn.Module):
    """A small language model of 3.2 million parameters."""

    def __init__(self, vocabulary: int = 256, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, a batch and its targets."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if name == "transformer":
        tokens = torch.randint(256, (8, 65), generator=generator)
        return Transformer(), tokens[:, :-1], tokens[:, 1:].flatten(1)
    if name == "lenet":
        return Lenet(), torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,), generator=generator)
    batch = 256 if name == "mlp" else 16
    widths = (784, 1024, 1024, 10) if name == "mlp" else (784, 400, 200, 10)
    layers = [layer for p, q in itertools.pairwise(widths) for layer in (nn.Linear(p, q), nn.ReLU())]
    x, y = torch.randn(batch, 784, generator=generator), torch.randint(10, (batch,), generator=generator)
    return nn.Sequential(*layers[:-1]), x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over all positions, or over examples."""
    outputs = model(x)
    return nn.functional.cross_entropy(outputs.mT if y.ndim == 2 else outputs, y)


def on_a_rank(names: list[str], kinds: list[str], rounds: int) -> Iterator[tuple[str, int, dict[str, Seconds]]]:
    """What every kind took in every round."""
    for name in names:
        models: dict[str, DistributedDataParallel] = {}
        orderings: dict[str, Ordering] = {}
        for kind in kinds:
            model, batch, targets = make(name)
            models[kind] = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if kind != "plain":
                unit_size = None if kind == "batch" else 1
                orderings[kind] = Ordering(10**6, batch_size=len(batch), unit_size=unit_size)
                orderings[kind].attach(models[kind], source=kind)
        optimizers = {kind: torch.optim.SGD(model.parameters(), lr=1e-3) for kind, model in models.items()}
        found = {kind: Seconds([], 0) for kind in kinds}
        for turn in range(rounds + 1):
            first = turn % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                ordering = orderings.get(kind)
                sent = 0 if ordering is None else ordering._epochs.bytes_sent
                dist.barrier()
                start = time.perf_counter()
                for _ in range(STEPS):
                    loss_of(models[kind], batch, targets).backward()
                    optimizers[kind].step()
                    optimizers[kind].zero_grad()
                if ordering is not None:
                    _ = ordering.epoch  # once the work that goes on beside training is done
                dist.barrier()
                if turn:  # the first round warms up
                    took = (time.perf_counter() - start) / STEPS
                    sent = 0 if ordering is None else (ordering._epochs.bytes_sent - sent) // STEPS
                    found[kind] = Seconds([*found[kind].of_rounds, took], sent)
        count = sum(parameter.numel() for parameter in models["plain"].parameters())
        yield name, count, found
        for ordering in orderings.values():
            ordering.detach()


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=[*KINDS, ROWS])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for size in options.ranks:
        for name, count, found in launch(on_a_rank, size, options.models, options.kinds, options.rounds):
            plain = found["plain"].of_rounds
            for kind, (seconds, sent) in found.items():
                ratios = sorted(a / b for a, b in zip(seconds, plain, strict=True))
                quarter = len(ratios) // 4
                rows.append(
                    [
                        name,
                        f"{count:,}",
                        str(size),
                        kind,
                        f"{statistics.median(seconds) * 1e3:.1f}",
                        f"{statistics.median(ratios):.2f}x",
                        f"{ratios[quarter]:.2f}x to {ratios[-1 - quarter]:.2f}x",
                        f"{sent:,}" if kind != "plain" else "",
                    ]
                )
                print(" ".join(rows[-1]), flush=True)
    header = [
        "model",
        "parameters",
        "ranks",
        "source",
        "ms per step",
        "over plain",
        "middle half",
        "bytes for ordering",
    ]
    body = (
        f"Milliseconds per training step, median of {options.rounds} rounds of {STEPS} steps; ratios within a round. "
        "`plain` is DistributedDataParallel alone; the others have an ordering attached, with its default exchange. "
        "Bytes are what a rank sends in a step for ordering; with `batch` they take the place of the all-reduce.\n\n"
        + report.table(header, rows)
    )
    report.write("step", "A training step with ordering attached", body)


if __name__ == "__main__":
    main()

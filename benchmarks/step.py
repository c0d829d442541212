"""What a training step under DistributedDataParallel costs with ordering attached, against the same step without.

    python -m benchmarks.step [--ranks 4] [--rounds N]

Forward, backward, averaging and the optimizer's step; a unit is a rank's batch. Both models live in the same ranks and
take turns, so that they share the machine's noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.ranks import launch
from cdgrab import Ordering

STEPS = 4  # of a model in a round: two pairs
MODELS = ["transformer", "mlp"]


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
        return logits.flatten(0, 1)


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, a batch and its targets."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if name == "transformer":
        tokens = torch.randint(256, (8, 65), generator=generator)
        return Transformer(), tokens[:, :-1], tokens[:, 1:].flatten()
    mlp = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return mlp, torch.randn(256, 784, generator=generator), torch.randint(10, (256,), generator=generator)


def on_a_rank(names: list[str], rounds: int) -> Iterator[tuple[str, int, dict[str, list[float]], float]]:
    """Seconds per step of both kinds in every round."""
    for name in names:
        kinds: dict[str, DistributedDataParallel] = {}
        for kind in ("plain", "attached"):
            model, batch, targets = make(name)
            kinds[kind] = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ordering = Ordering(10**6, batch_size=len(batch))
        ordering.attach(kinds["attached"])
        optimizers = {kind: torch.optim.SGD(model.parameters(), lr=1e-3) for kind, model in kinds.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        before = 0.0
        for turn in range(rounds + 1):
            if turn == 1:
                before = ordering._meter.seconds  # the first round warms up
            for kind in list(kinds)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(STEPS):
                    nn.functional.cross_entropy(kinds[kind](batch), targets).backward()
                    optimizers[kind].step()
                    optimizers[kind].zero_grad()
                ordering._settle()
                dist.barrier()
                if turn:
                    seconds[kind].append((time.perf_counter() - start) / STEPS)
        count = sum(parameter.numel() for parameter in kinds["plain"].parameters())
        yield name, count, seconds, (ordering._meter.seconds - before) / (STEPS * rounds)
        ordering.detach()


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for size in options.ranks:
        for name, count, seconds, own in launch(on_a_rank, size, options.models, options.rounds):
            ratios = sorted(a / b for a, b in zip(seconds["attached"], seconds["plain"], strict=True))
            rows.append(
                [
                    name,
                    f"{count:,}",
                    str(size),
                    f"{statistics.median(seconds['plain']) * 1e3:.1f}",
                    f"{statistics.median(seconds['attached']) * 1e3:.1f}",
                    f"{own * 1e3:.1f}",
                    f"{statistics.median(ratios):.3f}x",
                    f"{ratios[len(ratios) // 4]:.2f}x to {ratios[-1 - len(ratios) // 4]:.2f}x",
                ]
            )
    header = ["model", "parameters", "ranks", "plain", "attached", "own seconds", "attached / plain", "middle half"]
    body = (
        f"Milliseconds per training step, median of {options.rounds} rounds of {STEPS} steps; ratios within a round. "
        "Order `cd-grab`, exchange `sharded`. `own seconds` is what `metrics()` reports per step, in milliseconds: "
        "time of the thread beside the backward pass, whether or not anything waited for it. Budget: 1.05x for steps "
        "of 50 ms or more.\n\n" + report.table(header, rows)
    )
    report.write("step", "A training step with ordering attached", body)


if __name__ == "__main__":
    main()

"""What gradients of single examples cost in a training step: ghost records, sketches and torch.func against none.

    python -m benchmarks.per_example [--models mlp lenet ...] [--batches 32 128] [--rounds N]

A step is forward, backward and the optimizer's; every example is a worker of its own, so that a pair takes two steps.
Every contender runs in a process of its own for its peak memory, and in turns with the others for its seconds.
Opacus is optional: pip install --no-deps opacus opt_einsum
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks import report
from cdgrab import Ordering, World, per_example_grads

MOST_NUMBERS = {"cpu": 1 << 30, "cuda": 1 << 34}  # of rows
HUNGRY = ("rows", "opacus", "vmap")
STEPS = {"cpu": 4, "cuda": 20}  # of a contender in a round, at least
ROUND = 0.2  # seconds of a contender's steps in a round, about
SIZES = {"transformer-3m": (256, 4), "transformer-30m": (640, 6)}
MODELS = ["mlp", "lenet", "adapters", "lstm", "encoder-3m", *SIZES]
IMPOSSIBLE = {("opacus", "lstm"), ("opacus", "encoder-3m")}  # it has layers of its own for these
CONTENDERS = ["plain", "ghost", "sketch", "rows", "opacus", "vmap"]
FLOOR = "hooks"  # of everything that watches layers: hooks that do nothing


class Lenet(nn.Module):
    """For images of 32 x 32 with three colours; 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1)
        logits: Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward part, made of Linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        grown: Tensor = self.down(gelu(self.up(self.norm2(x))))
        return x + grown


class Transformer(nn.Module):
    """A language model on bytes."""

    def __init__(self, width: int, layers: int, positions: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, index: Tensor) -> Tensor:
        places = torch.arange(index.shape[1], device=index.device).expand_as(index)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(index) + self.places(places))))
        return logits.mT


class Encoder(nn.Module):
    """The transformer of 3 million parameters again, of PyTorch's layers."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        made = (nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers))
        self.layers, self.out = nn.Sequential(*made), nn.Linear(width, 256)

    def forward(self, index: Tensor) -> Tensor:
        logits: Tensor = self.out(self.layers(self.embedding(index)))
        return logits.transpose(1, 2)


class Adapters(nn.Module):
    """A frozen network with a correction of rank 8 beside every layer, as in LoRA."""

    def __init__(self, width: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, 8, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(8, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.relu(frozen(x) + up(down(x)))
        return x


class Tagger(nn.Module):
    """A label for every word, from two recurrent layers; 0.3 million parameters."""

    def __init__(self, words: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, index: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.embedding(index))[0])
        return logits.transpose(1, 2)


def make(name: str, batch: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and targets."""
    torch.manual_seed(0)
    model: nn.Module
    if name in SIZES or name == "encoder-3m":
        tokens = torch.randint(256, (batch, 65))
        model = Transformer(*SIZES[name]) if name in SIZES else Encoder()
        x, y = tokens[:, :-1], tokens[:, 1:]
    elif name == "lenet":
        model, x, y = Lenet(), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    elif name == "lstm":
        tokens = torch.randint(256, (batch, 33))
        model, x, y = Tagger(), tokens[:, :-1], tokens[:, 1:]
    elif name == "adapters":
        model, x, y = Adapters(), torch.randn(batch, 1024), torch.randint(1024, (batch,))
    else:
        model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        x, y = torch.randn(batch, 784), torch.randint(10, (batch,))
    return model.to(device), x.to(device), y.to(device)


def stepper(contender: str, name: str, batch: int, device: str) -> Callable[[], None]:
    """One training step of a contender."""
    model, x, y = make(name, batch, device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1e-4, momentum=0.9)
    ordering = Ordering(batch * 10**4, batch_size=batch, unit_size=1, world=World.simulated(batch))
    sources = {"ghost": "ghost", "sketch": "sketch", "rows": "per_example"}
    if contender in sources:
        ordering.attach(model, source=sources[contender], fitted=False)  # as in epochs that gather nothing
    if contender == FLOOR:
        _watch(model)
    if contender == "opacus":
        model = importlib.import_module("opacus.grad_sample").GradSampleModule(model)

    def step() -> None:
        if contender == "vmap":
            rows = per_example_grads(model, cross_entropy, x, y)
            ordering.observe(rows)
            mean = rows.mean(0).split([parameter.numel() for parameter in trainable])
            for parameter, part in zip(trainable, mean, strict=True):
                parameter.grad = part.view_as(parameter)
        else:
            cross_entropy(model(x), y).backward()
        if contender == "opacus":
            samples: list[Any] = [parameter.grad_sample for parameter in trainable]  # type: ignore[attr-defined]
            ordering.observe(torch.cat([sample.flatten(1) for sample in samples], dim=1))
            for parameter in trainable:
                parameter.grad_sample = None  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _watch(model: nn.Module) -> None:
    """Hooks where attachments have theirs."""

    def on_grad(grad: Tensor) -> None:
        pass

    def after(module: nn.Module, args: Any, output: Tensor) -> None:  # noqa: ARG001
        output.register_hook(on_grad)

    for module in model.modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            module.register_forward_hook(after)


def peak(contender: str, name: str, batch: int, device: str) -> float:
    """MiB at the peak of some steps, above what was there before the model.

    A GPU counts its own memory, with what cuBLAS takes for itself, as in a process that does nothing else; on the CPU
    such a process is needed.
    """
    import torch.multiprocessing as mp

    if device == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _some_steps(contender, name, batch, device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    process = context.Process(target=_peak, args=(contender, name, batch, device, answers))
    process.start()
    found: float = answers.get()
    process.join()
    return found


def _peak(contender: str, name: str, batch: int, device: str, answers: Any) -> None:
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    # Compiles what will be needed: numba takes about 140 MiB, once, however large the model is.
    Ordering(4, batch_size=2, unit_size=1, world=World.simulated(2)).observe(torch.ones(2, 2, 3))
    small = nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten(), nn.Linear(4, 1))
    for source in ("ghost", "sketch"):
        ordering = Ordering(4, batch_size=2, unit_size=1, world=World.simulated(2))
        ordering.attach(small, source=source, fitted=False)
        for _ in range(2):
            small(torch.ones(2, 1, 3, 3)).sum().backward()
        ordering.detach()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing everything
    before = _resident("VmHWM")
    _some_steps(contender, name, batch, device)
    answers.put(_resident("VmHWM") - before)


def _some_steps(contender: str, name: str, batch: int, device: str) -> None:
    """Pairs, and on a GPU enough of them for recordings to have been made."""
    step = stepper(contender, name, batch, device)
    for _ in range(4 if device == "cpu" else 12):
        step()


def _resident(what: str) -> float:
    """MiB of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 2**10


def measure(name: str, batch: int, rounds: int, device: str, contenders: list[str]) -> list[list[str]]:
    """Rows of the table for one model and batch."""
    dim = sum(parameter.numel() for parameter in make(name, 1, "cpu")[0].parameters() if parameter.requires_grad)
    if 2 * batch * dim > MOST_NUMBERS[device]:  # rows of two steps
        contenders = [contender for contender in contenders if contender not in HUNGRY]
    contenders = [contender for contender in contenders if (contender, name) not in IMPOSSIBLE]
    steps = {contender: stepper(contender, name, batch, device) for contender in contenders}
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    counts = dict.fromkeys(contenders, STEPS[device])
    for turn in range(rounds + 1):
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            _wait(device)
            start = time.perf_counter()
            for _ in range(counts[contender]):
                steps[contender]()
            _wait(device)
            seconds[contender].append((time.perf_counter() - start) / counts[contender])
        if turn == 0:  # it warms up, and says how many steps a round has; whole pairs of them
            counts = {key: max(STEPS[device], int(ROUND / took[0]) // 2 * 2) for key, took in seconds.items()}
            seconds = {contender: [] for contender in contenders}
    del steps
    memory = {contender: peak(contender, name, batch, device) for contender in contenders}
    rows = []
    for contender in contenders:
        ratio = statistics.median(a / b for a, b in zip(seconds[contender], seconds["plain"], strict=True))
        rows.append(
            [
                name,
                str(batch),
                contender,
                f"{statistics.median(seconds[contender]) * 1e3:.1f}",
                f"{ratio:.2f}x",
                f"{memory[contender]:.0f}",
                f"{memory[contender] / memory['plain']:.2f}x",
            ]
        )
        print(" ".join(rows[-1]), flush=True)
    return rows


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=[*CONTENDERS, FLOOR])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if importlib.util.find_spec("opacus") is None and "opacus" in options.contenders:
        print("opacus is not installed and is left out")
        options.contenders.remove("opacus")
    warnings.simplefilter("ignore")  # torch.func tells of every rule it misses
    rows = [
        row
        for name in options.models
        for batch in options.batches
        for row in measure(name, batch, options.rounds, options.device, options.contenders)
    ]
    header = ["model", "batch", "gradients", "ms per step", "vs plain", "peak MiB", "vs plain"]
    body = (
        f"Milliseconds per training step, median of {options.rounds} rounds of at least {STEPS[options.device]} steps, "
        f"or as many as take about {ROUND} s; ratios within a round. `plain` orders nothing; `ghost` is "
        "`attach(model, source='ghost')`; `rows` is `source='per_example'`; `vmap` "
        "is `per_example_grads` with `observe`, which replaces the backward pass; `opacus` is its per-sample gradients "
        "with `observe`; `sketch` is `source='sketch'` with about 1,024 numbers per example, in an epoch that fits "
        f"nothing; `hooks` are hooks that do nothing. "
        f"A contender whose rows would take more than {MOST_NUMBERS[options.device] * 4 / 2**30:.0f} GiB is "
        "left out. Every example is a worker. Peak memory above what there was before the model was made, numba "
        "loaded: of a process, or of the GPU, workspaces of cuBLAS included.\n\n" + report.table(header, rows)
    )
    some = "" if options.models == MODELS else "_" + "_".join(options.models)
    report.write(f"per_example{some}", "Gradients of single examples", body)


if __name__ == "__main__":
    main()

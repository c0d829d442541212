"""What gradients of single examples cost in a training step: sketches and rows against none, and against rivals.

    python -m benchmarks.per_example [--models mlp lenet ...] [--batches 32 128] [--rounds N] [--before SRC]

A step is forward, backward and the optimizer's; every example of a batch has a lane of its own. Every contender runs in
a process of its own, all of them in turns. `SRC` is the `src` folder of an older checkout, whose `ghost` and `sketch`
then take part (commit f25ed79; `git worktree add` makes one).
Opacus is optional: pip install --no-deps opacus opt_einsum
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks import report
from benchmarks.sketch_tasks import lanes
from cdgrab import Ordering, per_example_grads

MOST_NUMBERS = {"cpu": 1 << 30, "cuda": 1 << 34}  # of rows
HUNGRY = ("rows", "opacus", "vmap")
STEPS = {"cpu": 4, "cuda": 20}  # of a contender in a round, at least
PAUSE = 0.3  # seconds, until threads of the one before have gone to sleep
ROUND = 0.2  # seconds of a contender's steps in a round, about
SIZES = {"transformer-3m": (256, 4), "transformer-30m": (640, 6)}
MODELS = ["mlp", "lenet", "adapters", "lstm", "encoder-3m", *SIZES]
IMPOSSIBLE = {("opacus", "lstm"), ("opacus", "encoder-3m")}  # it has layers of its own for these
CONTENDERS = ["plain", "sketch", "rows", "opacus", "vmap"]
BEFORE = ["before: ghost", "before: sketch"]  # of an older checkout
FLOOR = "hooks"  # of everything that watches layers: hooks that do nothing
ATTACH: dict[str, dict[str, Any]] = {
    "sketch": {"source": "sketch"},
    "rows": {"source": "per_example"},
    "before: ghost": {"source": "ghost"},
    "before: sketch": {"source": "sketch", "fitted": False},  # as in epochs that gathered nothing
}


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
    ordering = Ordering(batch * 10**4, batch_size=batch, unit_size=1, **lanes(batch))
    if contender in ATTACH:
        ordering.attach(model, **ATTACH[contender])
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


class Contender:
    """A process that takes steps when it is asked to. It is started with the library that it is about."""

    def __init__(self, contender: str, name: str, batch: int, device: str, before: Path | None) -> None:
        here = Path(__file__).parents[1]
        library = before if contender in BEFORE and before is not None else here / "src"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.per_example", "--serve", contender, name, str(batch), device],
            env={**os.environ, "PYTHONPATH": f"{library}:{here}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peak = float(self._answer())  # MiB of some steps, above what was there before the model

    def seconds(self, steps: int) -> float:
        """Per step, of so many steps."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return float(self._answer()) / steps

    def end(self) -> None:
        """Let it go."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a contender has failed; what it said is above")
        return line


def serve(contender: str, name: str, batch: int, device: str) -> None:
    """In a process of its own: say how much memory steps take, then how long, as often as asked."""
    warnings.simplefilter("ignore")
    if device == "cpu":
        torch.set_num_threads(2)
        _compile_all()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing everything
        before = _resident("VmHWM")
    step = stepper(contender, name, batch, device)
    for _ in range(4 if device == "cpu" else 12):
        step()
    print(_resident("VmHWM") - before if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20, flush=True)
    for line in sys.stdin:
        _wait(device)
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        _wait(device)
        print(time.perf_counter() - start, flush=True)


def _compile_all() -> None:
    """What will be needed: numba takes about 140 MiB, once, however large the model is."""
    Ordering(4, batch_size=2, unit_size=1, **lanes(2)).observe(torch.randn(2, 2, 3))
    small = nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten(), nn.Linear(4, 1))
    ordering = Ordering(4, batch_size=2, unit_size=1, **lanes(2))
    ordering.attach(small, source="sketch")
    for _ in range(2):
        small(torch.randn(2, 1, 3, 3)).sum().backward()


def _resident(what: str) -> float:
    """MiB of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 2**10


def measure(
    name: str, batch: int, rounds: int, device: str, contenders: list[str], before: Path | None
) -> list[list[str]]:
    """Rows of the table for one model and batch."""
    dim = sum(parameter.numel() for parameter in make(name, 1, "cpu")[0].parameters() if parameter.requires_grad)
    if 2 * batch * dim > MOST_NUMBERS[device]:  # rows of two steps
        contenders = [contender for contender in contenders if contender not in HUNGRY]
    contenders = [contender for contender in contenders if (contender, name) not in IMPOSSIBLE]
    running = {contender: Contender(contender, name, batch, device, before) for contender in contenders}
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    counts = dict.fromkeys(contenders, STEPS[device])
    for turn in range(rounds + 1):
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            time.sleep(PAUSE)
            running[contender].seconds(2)  # what others left in caches is gone
            seconds[contender].append(running[contender].seconds(counts[contender]))
        if turn == 0:  # it warms up, and says how many steps a round has; whole pairs of them
            counts = {key: max(STEPS[device], int(ROUND / took[0]) // 2 * 2) for key, took in seconds.items()}
            seconds = {contender: [] for contender in contenders}
    rows = []
    for contender in contenders:
        running[contender].end()
        ratio = statistics.median(a / b for a, b in zip(seconds[contender], seconds["plain"], strict=True))
        rows.append(
            [
                name,
                str(batch),
                contender,
                f"{statistics.median(seconds[contender]) * 1e3:.1f}",
                f"{ratio:.2f}x",
                f"{running[contender].peak:.0f}",
                f"{running[contender].peak / running['plain'].peak:.2f}x",
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
    parser.add_argument("--before", type=Path, help="the src folder of an older checkout")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.serve:
        contender, name, batch, device = options.serve
        serve(contender, name, int(batch), device)
        return
    if options.before is not None:
        options.contenders += BEFORE
    if importlib.util.find_spec("opacus") is None and "opacus" in options.contenders:
        print("opacus is not installed and is left out")
        options.contenders.remove("opacus")
    warnings.simplefilter("ignore")  # torch.func tells of every rule it misses
    rows = [
        row
        for name in options.models
        for batch in options.batches
        for row in measure(name, batch, options.rounds, options.device, options.contenders, options.before)
    ]
    header = ["model", "batch", "gradients", "ms per step", "vs plain", "peak MiB", "vs plain"]
    body = (
        f"Milliseconds per training step, median of {options.rounds} rounds of at least {STEPS[options.device]} steps, "
        f"or as many as take about {ROUND} s; ratios within a round. `plain` orders nothing; `sketch` is "
        "`attach(model, source='sketch')` with its default length; `rows` is `source='per_example'`; `vmap` is "
        "`per_example_grads` with `observe`, which replaces the backward pass; `opacus` is its per-sample gradients "
        "with `observe`; `hooks` are hooks that do nothing. Those with `before` are of an older checkout: `ghost`, and "
        "`sketch` with 1,024 numbers in an epoch that fits nothing. "
        f"A contender whose rows would take more than {MOST_NUMBERS[options.device] * 4 / 2**30:.0f} GiB is "
        "left out. Every example of a batch has a lane of its own. Peak memory of a process, above what there was "
        "before the model was made and with numba loaded, or all of the GPU's.\n\n" + report.table(header, rows)
    )
    some = "" if options.models == MODELS else "_" + "_".join(options.models)
    report.write(f"per_example{some}", "Gradients of single examples", body)


if __name__ == "__main__":
    main()

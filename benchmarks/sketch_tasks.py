"""The tasks on which sketches are compared with exact ordering: small enough for one core, with something to gain.

Imported with this version of cdgrab and, for comparison, with an older one: only public names are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler

import cdgrab
from cdgrab import Ordering, per_example_grads


@dataclass(frozen=True)
class Task:
    """Data, a model and how it is trained.

    Attributes:
        load: `load(data)`: inputs and targets.
        make: `make(seed)`: the model.
        loss: `loss(model, x, y)`: the mean over the batch.
        last: Epochs over whose losses results are averaged.
    """

    load: Callable[[Path], tuple[Tensor, Tensor]]
    make: Callable[[int], nn.Module]
    loss: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
    batch: int
    epochs: int
    lr: float
    last: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"


def losses(task: Task, data: Path, seed: int, order: str, attach: dict[str, Any] | None) -> Iterator[float]:
    """The loss over the training set after every epoch. One lane for every slot of a batch.

    Args:
        task: What is trained.
        data: Folder with the public data files.
        seed: Of the model and of the first order.
        order: As in `Ordering`.
        attach: Options of `attach`; None for orders without gradients. `{"gaussian": k}` observes whole rows times a
            dense matrix of `k` columns instead: the rival.
    """
    x, y = task.load(data)
    model = task.make(seed)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[task.optimizer]
    more = {"momentum": task.momentum} if task.optimizer == "sgd" else {}
    optimizer = kind(model.parameters(), lr=task.lr, weight_decay=task.weight_decay, **more)
    ordering = Ordering(
        len(x),
        batch_size=task.batch,
        unit_size=1,
        order=order,
        seed=seed,
        drop_last=True,
        **lanes(task.batch),
    )
    gaussian = None if attach is None else attach.get("gaussian")
    if gaussian is not None:
        dim = sum(parameter.numel() for parameter in model.parameters())
        projection = torch.randn(dim, gaussian, generator=torch.Generator().manual_seed(seed))
    elif attach is not None:
        ordering.attach(model, **attach)
    batches = BatchSampler(ordering.sampler, task.batch, drop_last=False)
    for epoch in range(task.epochs):
        ordering.sampler.set_epoch(epoch)
        for index in batches:
            optimizer.zero_grad()
            if gaussian is not None:
                ordering.observe(rows(task, model, x[index], y[index]) @ projection)
            task.loss(model, x[index], y[index]).backward()
            optimizer.step()
        with torch.no_grad():
            parts = zip(x.split(1000), y.split(1000), strict=True)
            yield sum(float(task.loss(model, a, b)) * len(a) for a, b in parts) / len(x)


def rows(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Whole gradients of the examples of a batch."""
    return per_example_grads(model, lambda outputs, targets: task.loss(lambda _: outputs, x, targets), x, y)


def classified(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy."""
    return cross_entropy(model(x), y)


def network(seed: int, *widths: int, careful: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them; `careful` keeps the scale of activations in deep ones."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
        if careful:
            weight: Any = layers[-2].weight
            nn.init.kaiming_normal_(weight)
    return nn.Sequential(*layers[:-1])


def shipped(task: str) -> Any:
    """The module of one of the experiments, in this version or in an older one."""
    older = importlib.util.find_spec("cdgrab.ghost") is not None
    return importlib.import_module(f"{'cdgrab.paper' if older else 'cdgrab_experiments'}.tasks.{task}")


def lanes(count: int) -> dict[str, Any]:
    """The option of `Ordering` that makes so many lanes, in this version or in an older one."""
    older: Any = getattr(cdgrab.World, "local_workers", None)
    return {"lanes": count} if older is None else {"world": cdgrab.World.simulated(count)}


def digits(data: Path) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """1,797 images of 8 x 8."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def mnist(data: Path) -> tuple[Tensor, Tensor]:
    """The first 10,000 images."""
    task = shipped("mnist").TASK
    x, y = task.load(data, task.variants[0], 0).train
    return x[:10_000], y[:10_000]


def mnist_network(seed: int) -> nn.Module:
    """The network that `cdgrab` ships for MNIST: 784-128-10."""
    model: nn.Module = shipped("mnist").network(seed)
    return model


def m4(data: Path) -> tuple[Tensor, Tensor]:
    """Every tenth window."""
    task = shipped("m4").TASK
    x, y = task.load(data, "", 0).train
    return x[::10].contiguous(), y[::10].contiguous()


def m4_network(seed: int) -> nn.Module:
    """The autoregressive 20-64-64-1."""
    model: nn.Module = shipped("m4").Autoregressive(seed)
    return model


def m4_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Squared error over six predictions, each made of the ones before."""
    error: Tensor = model(x) - y
    return error.square().mean()


def cifar10(data: Path) -> tuple[Tensor, Tensor]:
    """The first 10,000 images, as the model takes them."""
    task = shipped("cifar10").TASK
    x, y = task.load(data, "", 0).train
    return x[:10_000], y[:10_000]


def lenet(seed: int) -> nn.Module:
    """62,006 parameters."""
    model: nn.Module = shipped("cifar10").lenet(seed)
    return model


WORDS, LENGTH = 1024, 32


def wikitext2(data: Path) -> tuple[Tensor, Tensor]:
    """1,024 stretches of 32 words from the validation text, of which the most frequent 1,023 are told apart."""
    from collections import Counter

    found = next(path for path in sorted(data.rglob("*valid*")) if path.is_file())
    words = [word for line in found.read_text(encoding="utf-8").split("\n") for word in [*line.split(), "<eos>"]]
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
    tokens = torch.tensor([known.get(word, WORDS - 1) for word in words])
    units = tokens[: 1024 * (LENGTH + 1)].view(1024, LENGTH + 1)
    return units[:, :-1].contiguous(), units[:, 1:].contiguous()


def llama(seed: int) -> nn.Module:
    """A Llama of two layers and 64 numbers, as the transformers package makes it from a configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    make: Any = LlamaForCausalLM
    model: nn.Module = make(config)
    return model


def next_word(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return cross_entropy(model(x, use_cache=False).logits.mT, y)


TASKS = {
    "softmax": Task(digits, lambda seed: network(seed, 64, 10), classified, batch=16, epochs=30, lr=0.5, last=3),
    "mlp": Task(digits, lambda seed: network(seed, 64, 64, 10), classified, batch=16, epochs=30, lr=0.1, last=3),
    "deep": Task(
        digits,
        lambda seed: network(seed, 64, *[64] * 10, 10, careful=True),
        classified,
        batch=16,
        epochs=30,
        lr=0.001,
        last=5,
    ),
    "mnist": Task(mnist, mnist_network, classified, batch=64, epochs=12, lr=0.1, last=3),
    "m4": Task(m4, m4_network, m4_loss, batch=16, epochs=10, lr=2e-3, last=3, momentum=0.9),
    "lenet": Task(cifar10, lenet, classified, batch=64, epochs=20, lr=2e-3, last=4, momentum=0.9),
    "llama": Task(wikitext2, llama, next_word, batch=16, epochs=20, lr=2e-3, last=3, optimizer="adamw"),
}

"""Models whose gradients are taken apart by example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from cdgrab import Ordering, flat_grad
from cdgrab.factors import Factors
from cdgrab.per_example.capture import ExampleCapture
from cdgrab.per_example.coverage import Coverage
from cdgrab.per_example.plan import make_plan
from cdgrab.sources import Attachment, GradientSource, Port, find_source


class Lenet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5, padding=1, stride=2, groups=2)
        self.fc1, self.fc2 = nn.Linear(16, 40), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.relu(self.conv2(x)).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Embeddings, two blocks, and a head that may share the table of the embeddings."""

    def __init__(self, *, tied: bool, vocabulary: int = 11, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(9, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, index: Tensor) -> Tensor:
        places = torch.arange(index.shape[1], device=index.device).expand_as(index)
        return self.head(self.blocks(self.tokens(index) + self.positions(places))).mT  # type: ignore[no-any-return]


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen layer with a small trainable correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


class Scale(nn.Module):
    """A layer nobody has heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _vectors(num: int, seed: int) -> tuple[Tensor, Tensor]:
    return randn(num, 6, seed=seed), torch.arange(num) % 5


def _images(num: int, seed: int) -> tuple[Tensor, Tensor]:
    return randn(num, 3, 12, 12, seed=seed), torch.arange(num) % 5


def _tokens(num: int, seed: int) -> tuple[Tensor, Tensor]:
    index = torch.randint(0, 11, (num, 8), generator=torch.Generator().manual_seed(seed))
    return index[:, :-1], index[:, 1:]


def _sequences(width: int, num: int, seed: int) -> tuple[Tensor, Tensor]:
    return randn(num, 7, width, seed=seed), torch.arange(num) % 5


# Name: how to make the model, and how to make inputs and targets for `num` examples.
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 5)), _vectors),
    "lenet": (Lenet, _images),
    "transformer": (lambda: LanguageModel(tied=False), _tokens),
    "tied": (lambda: LanguageModel(tied=True), _tokens),
    "used twice": (UsedTwice, _vectors),
    "adapters": (Adapted, _vectors),
    "normed": (
        lambda: nn.Sequential(
            nn.Conv1d(7, 8, 3, padding=1, dilation=2), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(16, 5)
        ),
        lambda num, seed: _sequences(4, num, seed),
    ),
    "lstm": (Recurrent, lambda num, seed: _sequences(4, num, seed)),
    "attention": (Attending, lambda num, seed: _sequences(8, num, seed)),
    "unknown": (lambda: nn.Sequential(Scale(), nn.Linear(6, 5)), _vectors),
}


def build(name: str, num: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    make: Any
    data: Any
    make, data = MODELS[name]
    torch.manual_seed(1)
    model: nn.Module = make().to(dtype)
    x, y = data(num, seed)
    return model, x.to(dtype) if x.is_floating_point() else x, y


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of every example, by as many backward passes."""
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append(flat_grad(model))
    model.zero_grad()
    return torch.stack(rows)


def source_of(name: str, length: int, **options: Any) -> GradientSource:
    """A source by name; sketches have this length."""
    return find_source(name, {**options, "length": length} if name == "sketch" else options)


class Collected:
    """A builder of rows that keeps the factors it is given."""

    def __init__(self) -> None:
        self.factors: dict[str, list[Factors]] = {}
        self.width = 0

    def add(self, name: str, factors: Factors) -> None:
        self.factors.setdefault(name, []).append(factors)

    def alone(self, name: str, factors: Factors) -> Tensor:  # noqa: ARG002
        return factors.rows()

    def remove(self, name: str, part: Tensor) -> None:  # noqa: ARG002
        del self.factors[name]

    def finish(self) -> Tensor:
        return torch.zeros(0)

    def drop(self) -> None:
        self.factors.clear()


class Catching:
    """A source whose rows are caught. The ordering gets what `change` makes of them, or nothing."""

    def __init__(self, source: GradientSource, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self._source, self._change = source, change
        self.rows: list[Tensor] = []

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        caught = self

        class Caught:
            """A port that only looks."""

            def __getattr__(self, name: str) -> Any:
                return getattr(port, name)

            def observe(self, rows: Tensor) -> None:
                caught.rows.append(rows.clone())
                if caught._change is not None:
                    port.observe(caught._change(rows))

        there: Any = Caught()
        self.attachment: Any = self._source.attach(there, model)
        return self.attachment


class Collecting:
    """A source that leaves the factors of a batch where they are."""

    def __init__(self, *, mean: bool) -> None:
        self._mean, self.collected = mean, Collected()

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        plan = make_plan(model)
        coverage = Coverage(plan.sizes, plan.left_out, strict=True)
        return ExampleCapture(port, plan, coverage, self.collected, mean=self._mean)


def factors_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> dict[str, list[Factors]]:
    """What a backward pass leaves of every parameter, use by use; gradients as of a sum over examples."""
    ordering = Ordering(len(x), batch_size=len(x), unit_size=1, order="rr")
    source = Collecting(mean=reduction == "mean")
    ordering.attach(model, source=Catching(source))
    cross_entropy(model(x), y, reduction=reduction).backward()
    ordering.detach()
    # A mean loss gives every example its share of the gradient.
    share = len(x) if reduction == "mean" else 1
    return {name: [factors.scaled(share) for factors in uses] for name, uses in source.collected.factors.items()}


def rows_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean", **how: Any) -> Tensor:
    """What an ordering that is attached to the model observes: whole rows, or sketches with `source="sketch"`."""
    ordering = Ordering(len(x), batch_size=len(x), unit_size=1, order="rr", seed=how.pop("seed", 0))
    source = Catching(find_source(how.pop("source", "per_example"), {"reduction": reduction, **how}))
    ordering.attach(model, source=source)
    cross_entropy(model(x), y, reduction=reduction).backward()
    ordering.detach()
    [rows] = source.rows
    return rows * len(x) if reduction == "mean" else rows

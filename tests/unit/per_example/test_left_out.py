"""Models whose gradients of single examples can be seen in part: the rest is left out, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from _inputs import randn
from _models import Catching, rows_of, source_of
from cdgrab import Ordering
from cdgrab.sources import find_source

NUM, LENGTH, WORDS, WIDTH = 4, 3, 7, 8
TOKENS = torch.randint(0, WORDS, (5, NUM, LENGTH), generator=torch.Generator().manual_seed(0))
Y = torch.arange(NUM)
SOURCES = ["per_example", "sketch"]


class Words(nn.Module):
    """Words and positions, a class token, one layer, and whatever a subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.out = nn.Linear(WIDTH, NUM)
        self.double()

    def hidden(self, tokens: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.words(tokens) + self.positions(torch.arange(tokens.shape[1])[None]))
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.hidden(tokens).mean(1))
        return found


class ClassToken(Words):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def hidden(self, tokens: Tensor) -> Tensor:
        return super().hidden(tokens) * self.token


class Loose(Words):
    """The weight of a layer is used outside of it for a twentieth of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = super().hidden(tokens)
        return torch.tanh(self.inner(hidden) + 0.05 * linear(hidden, self.inner.weight))


class Branching(nn.Module):
    """A layer of one's own that cannot run example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if float(x.detach().sum()) > -1e9 else x


class WithBranch(Words):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branching()

    def hidden(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.branch(super().hidden(tokens))
        return found


class Square(Words):
    """Positions by positions, as many as there are examples; at first nothing tells them from words."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * NUM, 1).double()

    def hidden(self, tokens: Tensor) -> Tensor:
        place = torch.arange(NUM)
        bias: Tensor = self.bias(place[:, None] - place + NUM)[..., 0]
        return super().hidden(tokens) * (1 + bias.sum())


class Bag(Words):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH).double()

    def hidden(self, tokens: Tensor) -> Tensor:
        offsets = torch.arange(NUM) * LENGTH
        return super().hidden(tokens) * self.bag(tokens.flatten(), offsets)[:, None]  # type: ignore[no-any-return]


LEFT_OUT: dict[type[Words], list[str]] = {
    Words: ["positions.weight"],
    ClassToken: ["positions.weight", "token"],
    Loose: ["positions.weight", "inner.weight"],
    WithBranch: ["positions.weight", "branch.scale"],
    Square: ["positions.weight", "bias.weight"],
    Bag: ["positions.weight", "bag.weight"],
}


def reference(model: nn.Module, tokens: Tensor, left_out: list[str]) -> Tensor:
    """What every example adds to the gradient of the mean loss, zeros for what is left out."""
    losses = cross_entropy(model(tokens), Y, reduction="none") / NUM
    parameters = dict(model.named_parameters())
    rows = []
    for loss in losses:
        grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        parts = [g * (name not in left_out) for name, g in zip(parameters, grads, strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", LEFT_OUT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("source", SOURCES)
def test_the_rest_is_balanced_and_one_warning_says_so(
    kind: type[Words], source: str, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = LEFT_OUT[kind]
    model, twin = kind(), kind()
    ordering = Ordering(5 * NUM, batch_size=NUM, unit_size=1, lanes=NUM)
    catching = Catching(source_of(source, 2**20), lambda rows: rows)
    ordering.attach(model, source=catching)
    assert len(ordering.order) == 5 * NUM
    other = Ordering(5 * NUM, batch_size=NUM, unit_size=1, lanes=NUM)
    for tokens in TOKENS:
        cross_entropy(model(tokens), Y).backward()
        other.observe(reference(twin, tokens, left_out))
    for rows, tokens in list(zip(catching.rows, TOKENS, strict=True))[kind is Square :]:
        expected = reference(twin, tokens, left_out)
        torch.testing.assert_close(rows @ rows.T, expected @ expected.T, rtol=1e-6, atol=1e-12)
    assert ordering.order.tolist() == other.order.tolist() or kind is Square  # it is found out in the second batch
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert ordering.metrics()["balanced"] == pytest.approx(1 - sum(map(sizes.get, left_out)) / sum(sizes.values()))  # type: ignore[arg-type]
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == (2 if kind is Square else 1)
    assert all(name in "\n".join(warnings) for name in left_out)


@pytest.mark.parametrize("kind", LEFT_OUT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("source", SOURCES)
def test_strict_refuses(kind: type[Words], source: str) -> None:
    model = kind()

    def first_steps() -> None:
        Ordering(5 * NUM, batch_size=NUM, unit_size=1).attach(model, source=source, strict=True)
        for tokens in TOKENS[:2]:
            cross_entropy(model(tokens), Y).backward()

    with pytest.raises(ValueError, match=r"strict=True, and .* cannot be balanced"):
        first_steps()


def test_explain_shows_what_is_left_out() -> None:
    text = Ordering(NUM, batch_size=NUM, unit_size=1).explain(ClassToken(), TOKENS[0])
    assert "74.2 % of the trained numbers are balanced" in text
    assert "left out: token: the model (ClassToken) has layers inside and uses these itself" in text
    assert r"left out: positions.weight: layer 'positions' (Embedding) has outputs of shape (1, 3, 8)" in text


class Scaled(nn.Module):
    """A frozen layer whose outputs are scaled by a parameter that no layer of its own uses."""

    def __init__(self, scales: nn.Module) -> None:
        super().__init__()
        self.scales, self.layer = scales, nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        [scale] = self.scales.parameters()
        return self.layer(x) * scale  # type: ignore[no-any-return]


LISTS = [nn.ParameterList([nn.Parameter(torch.ones(3))]), nn.ParameterDict({"scale": nn.Parameter(torch.ones(3))})]


@pytest.mark.parametrize("scales", LISTS, ids=["list", "dict"])
def test_parameters_that_no_layer_uses(scales: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing would ever be observed. By default batches become the units."""
    for source in SOURCES:
        with pytest.raises(ValueError, match=r"no trained parameter can be balanced.*(?s:.)* is no layer"):
            Ordering(8, batch_size=4).attach(Scaled(scales), source=source)
    givens: list[dict[str, Any]] = [{"unit_size": 1}, {"lanes": 4}]
    for given in givens:
        with pytest.raises(ValueError, match="no trained parameter can be balanced"):
            Ordering(8, batch_size=4, **given).attach(Scaled(scales))
    model, ordering = Scaled(scales), Ordering(32, batch_size=4)
    ordering.attach(model)
    assert "whole batches are ordered instead of single examples, which gains less" in caplog.text
    assert (ordering.unit_size, ordering.lanes, len(ordering.sampler)) == (4, 1, 32)
    for _ in range(8):
        model(randn(4, 3)).sum().backward()
    assert ordering.epoch == 1
    other = Ordering(32, batch_size=4, unit_size=4)
    other.load_state_dict(ordering.state_dict())
    assert other.order.tolist() == ordering.order.tolist()


def compiled_afterwards(model: nn.Module, attach: Callable[[], None]) -> Any:
    attach()
    return torch.compile(model, backend="eager")


def compiled_and_run_before(model: nn.Module, attach: Callable[[], None]) -> Any:
    compiled = torch.compile(model, backend="eager")
    compiled(TOKENS[0])
    attach()
    return compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [compiled_afterwards, compiled_and_run_before])
def test_a_model_that_is_trained_compiled(make: Callable[..., Any]) -> None:
    model = Words()
    ordering = Ordering(8, batch_size=NUM, unit_size=1)
    compiled = make(model, lambda: ordering.attach(model, source="sketch"))
    with pytest.raises(ValueError, match="no watched layer took part in it, so nothing was observed"):
        cross_entropy(compiled(TOKENS[0]), Y).backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# torch.compile itself looks; since torch 2.15 it hides the warning, which fails where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = Words()
    model.out.compile(backend="eager")
    ordering = Ordering(5 * NUM, batch_size=NUM, unit_size=1)
    ordering.attach(model, source="sketch")
    for tokens in TOKENS:
        cross_entropy(model(tokens), Y).backward()
    assert "out.weight, out.bias: layer 'out' (Linear) is compiled" in caplog.text
    assert ordering.epoch == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_change_between_epochs_is_followed(source: str, caplog: pytest.LogCaptureFixture) -> None:
    """A layer is unfrozen, and another one replaced: the next epoch is like that of a model attached anew."""

    def epoch(model: nn.Module, ordering: Ordering) -> None:
        assert len(ordering.order) == 5 * NUM
        for tokens in TOKENS:
            cross_entropy(model(tokens), Y).backward()

    def change(model: Words) -> None:
        torch.manual_seed(1)
        model.words.requires_grad_(True)
        model.out = nn.Linear(WIDTH, NUM).double()

    def made() -> tuple[Words, Ordering]:
        model = Words()
        model.words.requires_grad_(False)
        return model, Ordering(5 * NUM, batch_size=NUM, unit_size=1)

    caplog.set_level(logging.INFO)
    (followed, ordering), (anew, again) = made(), made()
    for model, one in ((followed, ordering), (anew, again)):
        one.attach(model, source=source_of(source, 64))
        epoch(model, one)
    change(followed)
    epoch(followed, ordering)
    assert "the model is attached again" in caplog.text
    assert ordering.epoch == 2
    assert ordering.metrics()["balanced"] == pytest.approx(1 - 24 / 116)
    if source == "sketch":  # whole rows of another width are refused where the model is attached by hand
        again.detach()
        change(anew)
        again.attach(anew, source=source_of(source, 64))
        epoch(anew, again)
        assert ordering.order.tolist() == again.order.tolist()


@pytest.mark.parametrize(
    "options", [{"sparse": True}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"padding_idx": 2}], ids=str
)
def test_embeddings_with_options(options: dict[str, Any]) -> None:
    model = Words()
    model.words = nn.Embedding(WORDS, WIDTH, **options).double()
    model.positions.requires_grad_(False)
    rows = rows_of(model, TOKENS[0], Y) / NUM
    grads = [p.grad.to_dense().flatten() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(rows.sum(0), torch.cat(grads))
    if "scale_grad_by_freq" not in options:  # this one mixes the examples of a batch
        model.words.sparse = False
        parameters = [p for p in model.parameters() if p.requires_grad]
        losses = cross_entropy(model(TOKENS[0]), Y, reduction="none") / NUM
        for row, loss in zip(rows, losses, strict=True):
            expected = torch.autograd.grad(loss, parameters, retain_graph=True)
            torch.testing.assert_close(row, torch.cat([part.flatten() for part in expected]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_batch_normalisation(training: bool, running: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Rows add up to the gradient of the batch; with running statistics they are those of single examples."""
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5, track_running_stats=running), nn.Flatten(), nn.Linear(80, NUM)
    ).double()
    model.train(training)
    x = randn(NUM, 3, 6, 6, dtype=torch.float64)
    rows = rows_of(model, x, Y) / NUM
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(rows.sum(0), torch.cat(grads))
    assert ("batch normalisation" in caplog.text) == training
    if not training and running:
        losses = cross_entropy(model(x), Y, reduction="none") / NUM
        for row, loss in zip(rows, losses, strict=True):
            expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            torch.testing.assert_close(row, torch.cat([part.flatten() for part in expected]))


def test_batch_normalisation_over_ranks_is_left_out() -> None:
    ordering = Ordering(8, batch_size=4, unit_size=1)
    with pytest.raises(ValueError, match=r"SyncBatchNorm.* takes statistics of examples that it does not see"):
        ordering.attach(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), source="sketch", strict=True)


def test_a_pass_in_which_nothing_is_left_counts_as_zero() -> None:
    """Half of the model is trained at a time, and one half cannot be seen."""
    first, second = nn.Linear(3, 3), Branching()
    model = nn.ModuleList([first, second])
    ordering = Ordering(16, batch_size=4, unit_size=1)
    catching = Catching(find_source("sketch", {}), lambda rows: rows)
    ordering.attach(model, source=catching)
    second(first(randn(4, 3)) @ randn(3, WIDTH)).sum().backward()
    second(randn(4, WIDTH).double()).sum().backward()
    assert not catching.rows[1].any()
    assert ordering.examples_left == 8

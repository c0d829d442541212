from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import _data
import cdgrab
from _asserts import assert_permutation
from cdgrab.paper.catalogue import CATALOGUE, DataError
from cdgrab.paper.tasks import TASKS, find_task
from cdgrab.paper.tasks import gpt2 as gpt2_task
from cdgrab.paper.tasks import wikitext2 as wikitext2_task
from cdgrab.paper.tasks.base import Problem
from cdgrab.paper.tasks.cifar10 import lenet
from cdgrab.paper.tasks.m4 import Autoregressive, smape
from cdgrab.paper.tasks.tools import area_under_curve, f1_score, matthews, seeded, smallest_logistic_loss

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")

VARIANTS = [
    pytest.param(name, variant, marks=needs_transformers if task.extras else ())
    for name, task in TASKS.items()
    for variant in task.variants
]
WITH_ROWS = [("digits", "softmax"), ("digits", "mlp"), ("hmda", ""), ("a9a", ""), ("m4", "")]
BY_LAYERS = [
    pytest.param(name, marks=needs_transformers if TASKS[name].extras else ())
    for name in ("mnist", "cifar10", "m4", "gpt2", "glue")
]


def make(name: str, folder: Path, variant: str | None = None, seed: int = 0) -> Problem:
    _data.MAKE[name](folder)
    task = find_task(name)
    return task.load(folder, task.variants[0] if variant is None else variant, seed)


def dim(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def gradient(problem: Problem, batch: tuple[Tensor, ...]) -> Tensor:
    grads = torch.autograd.grad(problem.loss(problem.model, *batch), list(problem.model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_task_trains_on_data_in_the_public_format(name: str, variant: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path, variant)
    num = min(16, len(problem.train[0]))
    batch = tuple(part[:num] for part in problem.train)
    assert {len(part) for part in problem.train} == {len(problem.train[0])}
    assert problem.labels is None or len(problem.labels) == len(problem.train[0])
    assert f"{len(problem.train[0]):,}" in problem.data

    first = problem.loss(problem.model, *batch)
    singly = [problem.loss(problem.model, *(part[i : i + 1] for part in batch)).item() for i in range(num)]
    assert first.item() == pytest.approx(np.mean(singly), rel=1e-4), "the loss must be the mean over units"

    before = problem.evaluate(problem.model)
    assert problem.metric in before
    assert all(math.isfinite(figure) for figure in before.values())
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=3e-3)
    for _ in range(12):
        optimizer.zero_grad()
        loss = problem.loss(problem.model, *batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < first.item() - 0.01
    assert problem.evaluate(problem.model) != before


@pytest.mark.parametrize(("name", "variant"), WITH_ROWS)
def test_rows_equal_automatic_differentiation(name: str, variant: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path, variant)
    problem.model.double()
    batch = tuple(part[:6].double() if part.is_floating_point() else part[:6] for part in problem.train)
    assert problem.rows is not None
    rows = problem.rows(problem.model, *batch)
    assert rows.shape == (6, dim(problem.model))
    assert not rows.requires_grad
    for i, row in enumerate(rows):
        expected = gradient(problem, tuple(part[i : i + 1] for part in batch))
        assert (row - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("name", BY_LAYERS)
def test_an_epoch_balances_single_examples_by_layers(name: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path)
    num = min(16, len(problem.train[0]) // 4 * 4)
    train = tuple(part[:num] for part in problem.train)
    ordering = cdgrab.Ordering(num, batch_size=4, unit_size=1, world=cdgrab.World.simulated(2), seed=0)
    before = torch.cat([*ordering.orders])
    ordering.attach(problem.model, source="ghost")
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=1e-3)
    for batch in torch.tensor(list(ordering.sampler)).split(4):
        optimizer.zero_grad()
        problem.loss(problem.model, *(part[batch] for part in train)).backward()
        optimizer.step()
    after = torch.cat([*ordering.orders])
    assert_permutation(after, range(num))
    assert after.tolist() != before.tolist()


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_model_follows_from_the_seed_alone(name: str, variant: str, tmp_path: Path) -> None:
    one = make(name, tmp_path, variant, seed=3)
    torch.randn(7)
    same, other = (find_task(name).load(tmp_path, variant, seed) for seed in (3, 4))
    for p, q in zip(one.model.parameters(), same.model.parameters(), strict=True):
        assert torch.equal(p, q)
    starts_at_zero = (name, variant) == ("digits", "softmax")
    differ = [not torch.equal(p, q) for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True)]
    assert any(differ) != starts_at_zero


def test_dimensions_are_those_of_the_paper() -> None:
    assert dim(lenet(0)) == 62_006
    assert dim(Autoregressive(0)) == 5_569
    assert dim(wikitext2_task.LanguageModel(33_278, 0)) == 1_081_792


@needs_transformers
def test_the_dimension_of_gpt2_is_that_of_the_paper() -> None:
    assert dim(gpt2_task.TinyGPT2(50_257, 0)) == 6_846_080


@needs_transformers
def test_gpt2_computes_what_transformers_does() -> None:
    transformers: Any = importlib.import_module("transformers")
    model = gpt2_task.TinyGPT2(60, seed=0, n_positions=12)
    with seeded(0):
        original = transformers.GPT2LMHeadModel(model.gpt2.config)
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model(tokens), original(input_ids=tokens).logits)
    assert model.gpt2.lm_head.weight is model.gpt2.transformer.wte.weight


def test_settings_are_those_of_the_paper() -> None:
    found = {name: (s.workers, s.batch_size, s.epochs, s.lr) for name, s in ((n, t.settings) for n, t in TASKS.items())}
    assert found["hmda"] == (4, 16, 50, 5e-3)
    assert found["wikitext2"] == (4, 4, 50, 5.0)
    assert found["m4"] == (4, 16, 30, 1e-3)
    assert found["gpt2"] == (64, 64, 30, 5e-4)
    assert found["cifar10"] == (64, 64, 100, 1e-3)
    for task in TASKS.values():
        assert all(name in CATALOGUE for name in task.needs)


def test_unknown_tasks_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no task 'cifar', did you mean 'cifar10'"):
        find_task("cifar")
    with pytest.raises(ValueError, match="no task 'zzz'; there are digits"):
        find_task("zzz")


def test_importing_the_tasks_is_cheap() -> None:
    heavy = ["transformers", "tokenizers", "sklearn", "pandas", "matplotlib", "scipy"]
    code = f"import cdgrab.paper.tasks, sys; print(*set(sys.modules) & set({heavy}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_hmda_prefers_the_authors_data_and_clips_the_stand_in(tmp_path: Path) -> None:
    stand_in = make("hmda", tmp_path)
    assert "stand-in" in stand_in.data
    assert dim(stand_in.model) == 11
    assert stand_in.train[0].max() <= 5
    _data.hmda_ny_2017(tmp_path)
    authors = find_task("hmda").load(tmp_path, "", 0)
    assert "stand-in" not in authors.data
    assert dim(authors.model) == 19


def test_cifar_says_whether_its_pixels_are_the_original_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    assert "not the original files" in make("cifar10", tmp_path).data
    (folder / "NOTE.txt").write_text("JPEG re-coded (quality 92)\n")
    assert "JPEG re-coded, not pixel-exact" in find_task("cifar10").load(tmp_path, "", 0).data
    known = CATALOGUE["cifar-10"]
    files = tuple(
        dataclasses.replace(file, sha256=(hashlib.sha256((folder / file.name).read_bytes()).hexdigest(),))
        for file in known.files
    )
    monkeypatch.setitem(CATALOGUE, "cifar-10", dataclasses.replace(known, files=files))
    assert find_task("cifar10").load(tmp_path, "", 0).data.startswith("CIFAR-10: 40 / 8 images")


def test_images_are_standardised_inside_the_model(tmp_path: Path) -> None:
    problem = make("cifar10", tmp_path)
    x = problem.train[0][:2]
    standardise = problem.model.get_submodule("0")
    expected = (x / 255 - torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)) / torch.tensor(
        [0.2023, 0.1994, 0.2010]
    ).view(3, 1, 1)
    torch.testing.assert_close(standardise(x), expected)


def test_minimum_is_where_the_gradient_vanishes(tmp_path: Path) -> None:
    for name in ("hmda", "a9a"):
        problem = make(name, tmp_path)
        assert problem.minimum is not None
        lowest = problem.minimum()
        problem.model.double()
        batch = tuple(part.double() for part in problem.train)
        solver = torch.optim.LBFGS(problem.model.parameters(), max_iter=2000, tolerance_grad=1e-10, tolerance_change=0)

        def closure(problem: Problem = problem, batch: tuple[Tensor, ...] = batch) -> Tensor:
            problem.model.zero_grad()
            loss = problem.loss(problem.model, *batch)
            loss.backward()
            return loss

        solver.step(closure)
        assert lowest == pytest.approx(closure().item(), abs=1e-7 if name == "a9a" else 1e-4)
    # By hand: a lone intercept, one success in four.
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    found = smallest_logistic_loss(torch.ones(4, 1), torch.tensor([0.0, 0.0, 0.0, 1.0]), 0.0)
    assert found == pytest.approx(entropy, abs=1e-12)


def test_minimum_of_digits(tmp_path: Path) -> None:
    problem = make("digits", tmp_path)
    assert problem.minimum is not None
    assert 0.2 < problem.minimum() < 0.3
    assert find_task("digits").load(tmp_path, "mlp", 0).minimum is None


def test_smape_by_hand() -> None:
    assert smape(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])) == pytest.approx(50.0)


def test_m4_measures_in_original_units(tmp_path: Path) -> None:
    problem = make("m4", tmp_path)
    for p in problem.model.parameters():  # predicts zero, which is the mean of every series
        nn.init.zeros_(p)
    lines = [(tmp_path / "m4" / f"Weekly-{split}.csv").read_text().splitlines()[1:] for split in ("train", "test")]
    train, test = ([[float(c.strip('"')) for c in line.split(",")[1:] if c] for line in part] for part in lines)
    by_hand = [
        200 * abs(sum(t) / len(t) - v) / (abs(sum(t) / len(t)) + abs(v))
        for t, values in zip(train, test, strict=True)
        for v in values
    ]
    assert problem.evaluate(problem.model)["smape"] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-6)
    windows = sum((len(t) - 26) // 3 + 1 for t in train)
    assert len(problem.train[0]) == windows - windows // 10


def test_matthews_f1_and_auc_by_hand() -> None:
    predicted, labels = torch.tensor([1, 1, 0, 0, 1]), torch.tensor([1, 0, 0, 1, 1])
    assert matthews(predicted, labels) == pytest.approx(1 / 6)  # (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2)
    assert matthews(torch.ones(5), labels) == 0.0
    assert f1_score(predicted, labels) == pytest.approx(2 / 3)
    assert f1_score(torch.zeros(2), torch.zeros(2)) == 0.0
    # Pairs of a positive and a negative: 3 right of 4, and one tie.
    assert area_under_curve(torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([0, 0, 1, 1])) == pytest.approx(3.5 / 4)
    assert math.isnan(area_under_curve(torch.ones(2), torch.ones(2)))


def test_perplexity_counts_every_word_and_carries_the_state() -> None:
    model = wikitext2_task.LanguageModel(11, seed=0)
    nn.init.normal_(model.embedding.weight)
    tokens = torch.randint(11, (53,), generator=torch.Generator().manual_seed(0))
    whole = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:]).item()
    for length in (7, 13, 52, 100):
        assert wikitext2_task.perplexity(model, tokens, columns=1, length=length) == pytest.approx(math.exp(whole))
    # Five columns of 11 words; the last is three short.
    columns = [
        F.cross_entropy(model(tokens[i : i + 11][None])[0], tokens[i + 1 : i + 12], reduction="sum")
        for i in (0, 11, 22, 33)
    ]
    columns.append(F.cross_entropy(model(tokens[44:52][None])[0], tokens[45:53], reduction="sum"))
    by_hand = math.exp(sum(column.item() for column in columns) / 52)
    assert wikitext2_task.perplexity(model, tokens, columns=5, length=4) == pytest.approx(by_hand)


def test_perplexity_of_blocks_counts_the_last_one() -> None:
    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.table(tokens)
            return found

    with seeded(0):
        model = Bigrams()
    tokens = torch.randint(5, (23,), generator=torch.Generator().manual_seed(0))
    ends = [i for i in range(1, 23) if i % 8]  # the first of a block is not predicted
    by_hand = F.cross_entropy(model(tokens[[i - 1 for i in ends]]), tokens[ends]).item()
    assert gpt2_task.perplexity(model, tokens, block=8, batch=1) == pytest.approx(math.exp(by_hand))
    assert gpt2_task.perplexity(model, tokens, block=8, batch=2) == pytest.approx(math.exp(by_hand))


def test_units_of_wikitext_are_pieces_of_columns(tmp_path: Path) -> None:
    x, y = wikitext2_task.units(torch.arange(16 * 80))
    assert x.shape == y.shape == (4 * 2, 4, 35)
    assert torch.equal(y, x + 1)
    assert x[0, :, 0].tolist() == [0, 80, 160, 240]
    assert x[1, 0, 0] == 35
    assert x[2, 0, 0] == 4 * 80
    assert wikitext2_task.words(" a b \n \n") == ["a", "b", "<eos>", "<eos>"]
    problem = make("wikitext2", tmp_path)
    assert not problem.single_examples
    assert dim(problem.model) == (len(_data.WORDS) + 1) * 32 + 2 * (4 * 32 * 64 + 8 * 32)


@needs_transformers
def test_tokens_are_kept_and_made_again_if_damaged(tmp_path: Path) -> None:
    first = make("gpt2", tmp_path)
    (kept,) = (tmp_path / "tokenised").iterdir()
    again = find_task("gpt2").load(tmp_path, "", 0)
    assert torch.equal(first.train[0], again.train[0])
    kept.write_bytes(kept.read_bytes()[:100])
    assert torch.equal(find_task("gpt2").load(tmp_path, "", 0).train[0], first.train[0])
    assert "WikiText-2 (the paper has WikiText-103)" in first.data


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def scramble(path: Path) -> None:
    path.write_bytes(b"x\ty\n" * 5)


DAMAGED: list[tuple[str, str, Callable[[Path], None], str]] = [
    ("hmda", "hmda/hmda2018.npz", cut, "does not hold the arrays"),
    ("a9a", "a9a/a9a", scramble, "no LIBSVM text in line 1"),
    ("m4", "m4/Weekly-train.csv", scramble, "is not the file that is listed in SHA256SUMS"),
    ("m4", "m4/Weekly-test.csv", cut, "is not the file that is listed"),
    ("cifar10", "cifar-10-batches-bin/data_batch_3.bin", cut, "no multiple of 3,073"),
    ("mnist", "mnist/train-images-idx3-ubyte.gz", cut, "cannot be unpacked"),
    ("mnist", "mnist/t10k-labels-idx1-ubyte", scramble, "is not the file that is listed"),
    ("wikitext2", "wikitext-2/wiki.train.tokens", cut, "is not the file that is listed"),
]


@pytest.mark.parametrize(("name", "file", "damage", "message"), DAMAGED)
def test_a_damaged_file_is_named_with_its_hash(
    name: str, file: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    _data.MAKE[name](tmp_path)
    damage(tmp_path / file)
    with pytest.raises(DataError, match=message) as caught:
        find_task(name).load(tmp_path, "", 0)
    assert str(tmp_path / file) in str(caught.value)
    assert "SHA-256 " in str(caught.value)


@pytest.mark.parametrize(("name", "file"), [("m4", "m4/Weekly-test.csv"), ("mnist", "mnist/t10k-labels-idx1-ubyte")])
def test_listed_files_are_checked_by_their_format(name: str, file: str, tmp_path: Path) -> None:
    _data.MAKE[name](tmp_path)
    scramble(tmp_path / file)
    _data.list_files((tmp_path / file).parent)
    with pytest.raises(DataError, match=r"Weekly-test\.csv|idx1-ubyte"):
        find_task(name).load(tmp_path, "", 0)


@needs_transformers
def test_a_damaged_table_or_encoder_is_named(tmp_path: Path) -> None:
    _data.glue(tmp_path)
    scramble(tmp_path / "glue" / "RTE" / "dev.tsv")
    with pytest.raises(DataError, match=r"dev.tsv has no example of RTE in line 2"):
        find_task("glue").load(tmp_path, "rte", 0)
    cut(tmp_path / "encoder" / "model.safetensors")
    with pytest.raises(DataError, match=r"model.safetensors cannot be read"):
        find_task("glue").load(tmp_path, "sst2", 0)
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(DataError, match="is of the type 't5'; expected 'bert'"):
        find_task("glue").load(tmp_path, "sst2", 0)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.needs])
def test_missing_data_say_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="CDGRAB_DATA") as caught:
        find_task(name).load(tmp_path, find_task(name).variants[0], 0)
    assert str(tmp_path) in str(caught.value)
    assert find_task(name).needs[0] in str(caught.value)

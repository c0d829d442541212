from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import _data
import cdgrab
from _asserts import assert_permutation
from _data import dim, make, needs_transformers
from _models import Catching
from cdgrab.sources import PerExampleSource
from cdgrab_experiments import compiled
from cdgrab_experiments.catalogue import CATALOGUE, DataError
from cdgrab_experiments.tasks import TASKS, find_task
from cdgrab_experiments.tasks import gpt2 as gpt2_task
from cdgrab_experiments.tasks import wikitext2 as wikitext2_task
from cdgrab_experiments.tasks.base import Problem
from cdgrab_experiments.tasks.cifar10 import lenet
from cdgrab_experiments.tasks.m4 import Autoregressive

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
def test_gradients_in_closed_form_equal_automatic_differentiation(name: str, variant: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path, variant)
    problem.model.double()
    batch = tuple(part[:6].double() if part.is_floating_point() else part[:6] for part in problem.train)
    assert problem.gradient is not None
    rows = torch.full((6, dim(problem.model)), torch.nan, dtype=torch.float64)
    expected = gradient(problem, batch)
    for place in (None, rows):
        found = problem.gradient(problem.model, *batch, rows=place)
        assert not found.requires_grad
        assert (found - expected).norm() <= 1e-9 * expected.norm()
    assert torch.equal(problem.rows(*batch), rows)
    for i, row in enumerate(rows):
        expected = gradient(problem, tuple(part[i : i + 1] for part in batch))
        assert (row - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.skipif(not compiled.available(), reason="numba is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_compiled_rows_are_those_of_products(
    num: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make("m4", tmp_path)
    assert problem.gradient is not None
    problem.model.to(dtype)
    batch = tuple(part[:num].to(dtype) for part in problem.train)
    found, expected = (torch.full((num, dim(problem.model)), torch.nan, dtype=dtype) for _ in range(2))
    mean = problem.gradient(problem.model, *batch, rows=found)
    monkeypatch.setattr(compiled, "available", lambda: False)
    expected_mean = problem.gradient(problem.model, *batch, rows=expected)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mean, expected_mean)


@pytest.mark.parametrize(("name", "variant"), [("hmda", ""), ("a9a", ""), ("digits", "softmax"), ("digits", "mlp")])
def test_rows_made_late_are_those_made_at_once(name: str, variant: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path, variant)
    assert problem.late is not None
    assert problem.gradient is not None
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.5)
    kept, batches, at_once = [], [], []
    for start in (0, 2, 4):  # weights change between steps
        batch = tuple(part[start : start + 2] for part in problem.train)
        at_once.append(problem.rows(*batch))
        kept.append(tuple(problem.train[0].new_empty(size) for size in problem.late.sizes(2)))
        found = problem.late.gradient(problem.model, *batch, kept=kept[-1])
        assert torch.equal(found, problem.gradient(problem.model, *batch))
        batches.append(batch)
        parameters = list(problem.model.parameters())
        for parameter, part in zip(parameters, found.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    steps, stacked = ([torch.stack(parts) for parts in zip(*lists, strict=True)] for lists in (kept, batches))
    assert torch.equal(problem.late.rows(tuple(steps), *stacked), torch.stack(at_once))


@pytest.mark.parametrize("name", BY_LAYERS)
def test_rows_from_layers_equal_automatic_differentiation(name: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path)
    problem.model.double()
    batch = tuple(part[:3].double() if part.is_floating_point() else part[:3] for part in problem.train)
    ordering = cdgrab.Ordering(3, batch_size=3, unit_size=1)
    catching = Catching(PerExampleSource())
    ordering.attach(problem.model, source=catching)
    problem.loss(problem.model, *batch).backward()
    ordering.detach()
    [rows] = catching.rows
    for i, row in enumerate(rows):
        expected = gradient(problem, tuple(part[i : i + 1] for part in batch))
        assert (3 * row - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("name", BY_LAYERS)
def test_an_epoch_balances_single_examples_by_layers(name: str, tmp_path: Path) -> None:
    problem = make(name, tmp_path)
    num = min(16, len(problem.train[0]) // 4 * 4)
    train = tuple(part[:num] for part in problem.train)
    ordering = cdgrab.Ordering(num, batch_size=4, unit_size=1, lanes=2, seed=0)
    before = torch.cat([*ordering.orders])
    ordering.attach(problem.model, source="sketch")
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
    code = f"import cdgrab_experiments.tasks, sys; print(*set(sys.modules) & set({heavy}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


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
        find_task(name).load(tmp_path, find_task(name).variants[0], 0)
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

"""Each task's own figures and formats, on cases that can be done by hand."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import _data
from _data import dim, make, needs_transformers
from cdgrab_experiments.catalogue import CATALOGUE, DataError
from cdgrab_experiments.data import find as find_data
from cdgrab_experiments.tasks import find_task
from cdgrab_experiments.tasks import glue as glue_task
from cdgrab_experiments.tasks import gpt2 as gpt2_task
from cdgrab_experiments.tasks import wikitext2 as wikitext2_task
from cdgrab_experiments.tasks.base import Problem
from cdgrab_experiments.tasks.hmda import FEATURES, _on_the_training_scale
from cdgrab_experiments.tasks.m4 import smape
from cdgrab_experiments.tasks.tools import area_under_curve, f1_score, matthews, seeded, smallest_logistic_loss


@needs_transformers
def test_gpt2_computes_what_transformers_does() -> None:
    transformers: Any = importlib.import_module("transformers")
    model = gpt2_task.TinyGPT2(60, seed=0, n_positions=12)
    with seeded(0):
        original = transformers.GPT2LMHeadModel(model.gpt2.config)
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model(tokens), original(input_ids=tokens).logits)
    assert model.gpt2.lm_head.weight is model.gpt2.transformer.wte.weight


def test_hmda_prefers_the_authors_data_and_clips_the_stand_in(tmp_path: Path) -> None:
    stand_in = make("hmda", tmp_path)
    assert "stand-in" in stand_in.data
    assert dim(stand_in.model) == 11
    assert stand_in.train[0].max() <= 5
    _data.hmda_ny_2017(tmp_path)
    authors = find_task("hmda").load(tmp_path, "", 0)
    assert "stand-in" not in authors.data
    assert dim(authors.model) == 19


def test_hmda_reads_the_public_tables_of_the_stand_in(tmp_path: Path) -> None:
    (tmp_path / "hmda").mkdir()
    header = "row_id,black," + ",".join(FEATURES) + ",high_priced"
    lines = [header, "1,0.0,1.0,1.0,0.0,-0.5,0.3,0.2,-0.2,-0.5,300.0,0.9,1.0", "2,,1,0,0,0,0,0,0,0,0,0,0"]
    (tmp_path / "hmda" / "hmda_train_preprocessed.csv").write_text("\n".join(lines) + "\n")
    lines = [
        ",loan_amount,loan_to_value_ratio,no_intro_rate_period,intro_rate_period,property_value,income,high_priced,"
        "debt_to_income_ratio,term_360,conforming,black",
        "131497,185000.0,96.5,1,0,195000.0,129.0,0.0,<20%,1.0,1.0,0.0",
        "851117,365000.0,95.0,0,85,385000.0,121.0,1.0,,1.0,1.0,",
    ]
    path = tmp_path / "hmda" / "hmda_test.csv"
    path.write_text("\n".join(lines) + "\n")
    _data.list_files(path.parent)
    problem = find_task("hmda").load(tmp_path, "", 0)
    assert "stand-in" in problem.data
    assert problem.train[0][0, 8] == 5.0
    # As the training table would have them.
    by_hand = torch.tensor(
        [
            [1, 1, 0, -0.47042087, 0.34513253, 0.24439439, -0.21530423, -0.50509757, -0.0080847, -2.52754664],
            [1, 1, 1, 0.32108188, 0.34243917, -4.09174681, 3.20322633, 0.08076316, -0.01085654, -1.15640581],
        ]
    )
    found = [_on_the_training_scale(row) for row in csv.DictReader(io.StringIO(path.read_text()))]
    torch.testing.assert_close(torch.tensor(found), by_hand, atol=1e-6, rtol=1e-6)
    path.write_text("\n".join(lines).replace("<20%", "a lot"))
    _data.list_files(path.parent)
    with pytest.raises(DataError, match=r"hmda_test.csv has no loan in line 2"):
        find_task("hmda").load(tmp_path, "", 0)


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


def test_the_loss_of_a_text_counts_every_word_and_carries_the_state() -> None:
    model = wikitext2_task.LanguageModel(11, seed=0)
    nn.init.normal_(model.embedding.weight)
    tokens = torch.randint(11, (53,), generator=torch.Generator().manual_seed(0))
    whole = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:]).item()
    for length in (7, 13, 52, 100):
        assert wikitext2_task.mean_loss(model, tokens, 1, length) == pytest.approx(whole)
    # Five columns of 11 words; the last is three short.
    columns = [
        F.cross_entropy(model(tokens[i : i + 11][None])[0], tokens[i + 1 : i + 12], reduction="sum")
        for i in (0, 11, 22, 33)
    ]
    columns.append(F.cross_entropy(model(tokens[44:52][None])[0], tokens[45:53], reduction="sum"))
    by_hand = sum(column.item() for column in columns) / 52
    assert wikitext2_task.mean_loss(model, tokens, 5, 4) == pytest.approx(by_hand)


def test_the_published_perplexity_divides_by_one_chunk_too_few() -> None:
    model = wikitext2_task.LanguageModel(11, seed=0)
    tokens = torch.randint(11, (16 * 71 + 5,), generator=torch.Generator().manual_seed(0))
    found = wikitext2_task.perplexities(model, tokens, tokens[:100])
    # 71 words of a column make two chunks of 35 and their targets.
    assert found["test_perplexity_published"] == pytest.approx(found["test_perplexity"] ** 2)
    assert found["valid_perplexity"] == pytest.approx(math.exp(wikitext2_task.mean_loss(model, tokens[:100], 16)))


def test_a_unit_continues_the_state_that_the_last_one_of_its_columns_left() -> None:
    model = wikitext2_task.LanguageModel(11, seed=0)
    nn.init.normal_(model.embedding.weight)
    tokens = torch.randint(11, (3, 2, 4, 5), generator=torch.Generator().manual_seed(0))  # steps x units x columns
    groups = torch.tensor([[2, 0], [1, 2], [0, 2]])
    with torch.no_grad():
        found = [model(x.flatten(0, 1), group) for x, group in zip(tokens, groups, strict=True)]
    # Group 2 has a unit in every step, group 0 in the first and the last.
    whole = model(torch.cat([tokens[0, 0], tokens[1, 1], tokens[2, 1]], 1)).detach()
    torch.testing.assert_close(torch.cat([found[0][:4], found[1][4:], found[2][4:]], 1), whole)
    torch.testing.assert_close(found[2][:4], model(torch.cat([tokens[0, 1], tokens[2, 0]], 1)).detach()[:, 5:])
    torch.testing.assert_close(found[1][:4], model(tokens[1, 0]).detach())
    where = model.carried.data_ptr()
    model.forget()
    torch.testing.assert_close(model(tokens[0, 0], groups[0, :1]), model(tokens[0, 0]))
    assert model.carried.data_ptr() == where  # a recorded step reads and writes there


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
    assert len(wikitext2_task.units(torch.arange(16 * 110))[0]) == 4 * 3
    assert torch.equal(wikitext2_task.units(torch.arange(16 * 110), even=True)[0][2:4, 0, 0], torch.tensor([440, 475]))
    assert wikitext2_task.words(" a b \n \n") == ["a", "b", "<eos>", "<eos>"]
    problem = make("wikitext2", tmp_path)
    assert problem.examples == 4
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


@needs_transformers
def test_an_encoder_computes_what_transformers_does(tmp_path: Path) -> None:
    problem = make("glue", tmp_path, "mrpc")
    words, kinds, mask, _ = (part[:5] for part in problem.train)
    assert len(set(mask.sum(1).tolist())) > 1
    assert kinds.max() == 1
    encoder, head = (problem.model.get_submodule(name) for name in ("encoder", "head"))
    hidden = encoder(input_ids=words, token_type_ids=kinds, attention_mask=mask)[0]
    means = torch.stack([row[: int(length)].mean(0) for row, length in zip(hidden, mask.sum(1), strict=True)])
    torch.testing.assert_close(problem.model(words, kinds, mask), head(means))
    assert "MRPC: 12 / 12 examples" in problem.data


@needs_transformers
def test_words_that_do_not_occur_are_left_out_of_an_encoder(tmp_path: Path) -> None:
    problem = make("glue", tmp_path, "cola")
    source = find_data("minilm", tmp_path)
    split, whole = glue_task.tokenizer(source), glue_task.pretrained(source)
    texts, _ = glue_task.read(find_data("glue-cola", tmp_path), "train.tsv", glue_task.TABLES["cola"])
    words, kinds, mask = split(texts)
    encoder: Any = problem.model.get_submodule("encoder")
    torch.testing.assert_close(
        encoder(input_ids=problem.train[0], token_type_ids=kinds, attention_mask=mask)[0],
        whole(input_ids=words, token_type_ids=kinds, attention_mask=mask)[0],
    )
    left, all_of_them = len(encoder.embeddings.word_embeddings.weight), len(whole.embeddings.word_embeddings.weight)
    assert left < all_of_them  # [UNK], if nothing else
    assert problem.data.endswith("encoder in encoder/")
    # Words of the development set are known too.
    assert set(problem.evaluate(problem.model)) == {"accuracy", "matthews", "dev_loss"}


def test_files_of_ones_own_are_said_to_be_so(tmp_path: Path) -> None:
    assert "those listed in SHA256SUMS" in make("m4", tmp_path).data

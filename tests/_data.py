"""Tiny data sets in the formats in which the public distributes the real ones, made on the spot."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cdgrab_experiments.tasks import find_task
from cdgrab_experiments.tasks.base import Problem

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "birds",
    "that",
    "sang",
    "of",
    "fields",
    "far",
    "away",
]


def list_files(folder: Path) -> None:
    """Say that these files are meant, though they are not those that are distributed."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in sorted(folder.iterdir()) if p.is_file()]
    (folder / "SHA256SUMS").write_text("\n".join(line for line in lines if "SHA256SUMS" not in line) + "\n")


def hmda_2018(data: Path, num: int = 24) -> None:
    rng = np.random.default_rng(0)
    (data / "hmda").mkdir(parents=True)
    x = rng.normal(size=(2 * num, 10)).astype(np.float32)
    x[0, 0] = 300.0
    y = (x[:, 1] + rng.normal(size=2 * num) > 0).astype(np.uint8)
    np.savez(data / "hmda" / "hmda2018.npz", X_train=x[:num], y_train=y[:num], X_test=x[num:], y_test=y[num:])


def hmda_ny_2017(data: Path, num: int = 24) -> None:
    (data / "HMDA").mkdir(parents=True)
    x = torch.randn(2 * num, 18, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).float()
    torch.save((x[:num], x[num:]), data / "HMDA" / "features-processed-NY-2017.pt")
    torch.save((y[:num], y[num:]), data / "HMDA" / "targets-processed-NY-2017.pt")


def a9a(data: Path, num: int = 24) -> None:
    rng = np.random.default_rng(0)
    (data / "a9a").mkdir(parents=True)
    for name in ("a9a", "a9a.t"):
        lines = []
        for _ in range(num):
            features = sorted(rng.choice(123, size=5, replace=False) + 1)
            label = "+1" if features[0] < 15 else "-1"
            lines.append(f"{label} " + " ".join(f"{feature}:1" for feature in features) + " ")
        (data / "a9a" / name).write_text("\n".join(lines) + "\n")


def m4(data: Path) -> None:
    rng = np.random.default_rng(0)
    (data / "m4").mkdir(parents=True)
    for name, lengths in (("Weekly-train.csv", (40, 52, 46)), ("Weekly-test.csv", (13, 13, 13))):
        longest = max(lengths)
        lines = [",".join(f'"V{i + 1}"' for i in range(longest + 1))]
        for number, length in enumerate(lengths):
            values = 1000 + 50 * rng.normal(size=length).cumsum()
            lines.append(",".join([f'"W{number + 1}"', *(f'"{v:.2f}"' for v in values), *[""] * (longest - length)]))
        (data / "m4" / name).write_text("\n".join(lines) + "\n")
    list_files(data / "m4")


def cifar10(data: Path, num: int = 8) -> None:
    rng = np.random.default_rng(0)
    folder = data / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        records = rng.integers(0, 256, size=(num, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)


def mnist(data: Path, num: int = 24) -> None:
    rng = np.random.default_rng(0)
    (data / "mnist").mkdir(parents=True)
    for split in ("train", "t10k"):
        images = rng.integers(0, 256, size=(num, 28, 28), dtype=np.uint8).tobytes()
        labels = rng.integers(0, 10, size=num, dtype=np.uint8).tobytes()
        with gzip.open(data / "mnist" / f"{split}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">HBBIII", 0, 8, 3, num, 28, 28) + images)
        (data / "mnist" / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, num) + labels)
    list_files(data / "mnist")


def wikitext2(data: Path, num: int = 2400) -> None:
    rng = np.random.default_rng(0)
    (data / "wikitext-2").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        words = [WORDS[i] for i in rng.integers(len(WORDS), size=num if split == "train" else num // 10)]
        lines = [" " + " ".join(words[i : i + 9]) + " \n" for i in range(0, len(words), 9)]
        (data / "wikitext-2" / f"wiki.{split}.tokens").write_text("".join(lines))
    list_files(data / "wikitext-2")


def glue(data: Path, num: int = 12) -> None:
    rng = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=rng.integers(2, 9)))

    def lines(title: str) -> list[str]:
        made = []
        for i in range(num):
            one, other, label = sentence(), f'"{sentence()}', i % 2
            made.append(
                {
                    "SST-2": f"{one}\t{label}",
                    "RTE": f"{i}\t{one}\t{other}\t{'not_' * label}entailment",
                    "CoLA": f"gj04\t{label}\t{'' if label else '*'}\t{one}",
                    "MRPC": f"{label}\t{i}\t{i}\t{one}\t{other}",
                }[title]
            )
        return made

    headers = {"SST-2": "sentence\tlabel", "RTE": "index\tsentence1\tsentence2\tlabel", "CoLA": None}
    headers["MRPC"] = "﻿Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for title, header in headers.items():
        (data / "glue" / title).mkdir(parents=True)
        for split in ("train", "dev"):
            text = "\n".join(([header] if header else []) + lines(title)) + "\n"
            (data / "glue" / title / f"{split}.tsv").write_text(text, encoding="utf-8")
    encoder(data)


def encoder(data: Path) -> None:
    """A random BERT with a vocabulary of the words above; needs transformers."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate(special + sorted(set(WORDS)))}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    split.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(data / "encoder")
    split.save(str(data / "encoder" / "tokenizer.json"))


# By task; what it needs in the data folder.
MAKE: dict[str, Callable[[Path], None]] = {
    "digits": lambda data: None,
    "hmda": hmda_2018,
    "a9a": a9a,
    "m4": m4,
    "cifar10": cifar10,
    "mnist": mnist,
    "wikitext2": wikitext2,
    "gpt2": wikitext2,
    "glue": glue,
}

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def make(name: str, folder: Path, variant: str | None = None, seed: int = 0) -> Problem:
    """The task `name` on tiny data that are made under `folder`."""
    MAKE[name](folder)
    task = find_task(name)
    return task.load(folder, task.variants[0] if variant is None else variant, seed)


def dim(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())

"""WikiText-2, word by word, with a small LSTM.

A unit is 4 columns of 35 words that always go together: 16 columns run through the text, a step takes 4 units, as many
words as the paper's 4 workers with 4 columns each.

The hidden state is zero at the start of every unit. Units are visited in any order, so what came before one in time is
not what comes before it in the text; the authors carry the state over all the same. In evaluation the text is read in
order, and there the state is carried.

No gradient is clipped: the paper's table has no clipping.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import device_of, seeded

COLUMNS, UNIT_COLUMNS, LENGTH = 16, 4, 35
WIDTH, LAYERS = 32, 2
# Evaluation reads several columns at once, for speed; each of them starts cold once.
EVAL_COLUMNS, EVAL_LENGTH = 16, 35

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embedding, LSTM, and a decoder with the embedding's weight and no bias: dim 1,081,792 for 33,278 words."""

    def __init__(self, num_words: int, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.embedding = nn.Embedding(num_words, WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
            self.decoder = nn.Linear(WIDTH, num_words, bias=False)
            nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Scores of the next word at every position, beginning with an empty state."""
        scores: Tensor = self.decoder(self.lstm(self.embedding(tokens_NT))[0])
        return scores

    def go_on(self, tokens_NT: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The same from a state, and the state it leaves."""
        hidden, state = self.lstm(self.embedding(tokens_NT), state)
        return self.decoder(hidden), state


def loss(model: nn.Module, x_Uct: Tensor, y_Uct: Tensor) -> Tensor:
    """Mean over all words; units are of equal length, so it is the mean over units too."""
    return F.cross_entropy(model(x_Uct.flatten(0, 1)).flatten(0, 1), y_Uct.flatten())


def perplexity(model: LanguageModel, tokens: Tensor, columns: int = EVAL_COLUMNS, length: int = EVAL_LENGTH) -> float:
    """Exponential of the mean loss over every word but the first.

    All words count, those of the last, shorter chunk too: the sum is divided by the number of words, where the authors'
    code takes one chunk too few. Every column carries its state from chunk to chunk.
    """
    device = device_of(model)
    num = len(tokens) - 1
    padding = -num % columns
    inputs = F.pad(tokens[:-1], (0, padding)).view(columns, -1).to(device)
    targets = F.pad(tokens[1:], (0, padding), value=-100).view(columns, -1).to(device)
    total, state = torch.zeros((), dtype=torch.float64, device=device), None
    with torch.no_grad():
        for x, y in zip(inputs.split(length, 1), targets.split(length, 1), strict=True):
            scores, state = model.go_on(x, state)
            total += F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
    return math.exp(min(float(total) / num, 700.0))


def words(text: str) -> list[str]:
    """Every line ends with a word of its own."""
    return [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), "<eos>")]


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """The vocabulary is that of all three files, in the order of first occurrence; all of it occurs in training."""
    found = data.find("wikitext-2", folder)
    texts = {split: words(found.text(f"wiki.{split}.tokens")) for split in ("train", "valid", "test")}
    vocabulary: dict[str, int] = {}
    for text in texts.values():
        for word in text:
            vocabulary.setdefault(word, len(vocabulary))
    train, valid, test = (torch.tensor([vocabulary[word] for word in text]) for text in texts.values())
    x, y = units(train)
    if not len(x) or min(len(valid), len(test)) < 2:
        raise found.damaged("wiki.train.tokens", f"has {len(train):,} words, which is not even one unit")

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, LanguageModel)
        return {"test_perplexity": perplexity(model, test), "valid_perplexity": perplexity(model, valid)}

    left_out = len(train) - 1 - y.numel()
    return Problem(
        model=LanguageModel(len(vocabulary), seed),
        train=(x, y),
        loss=loss,
        evaluate=evaluate,
        metric="test_perplexity",
        higher_is_better=False,
        data=f"WikiText-2: {len(train):,} / {len(valid):,} / {len(test):,} words, {len(vocabulary):,} different; "
        f"{len(x):,} units of {UNIT_COLUMNS} x {LENGTH} ({left_out} words at the ends of columns are left out)"
        f"{found.note}",
        examples=UNIT_COLUMNS,
    )


def units(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each `units x 4 x 35`; the targets are one word ahead."""
    columns = tokens[: len(tokens) // COLUMNS * COLUMNS].view(COLUMNS, -1)
    num = (columns.shape[1] - 1) // LENGTH
    shape = (COLUMNS // UNIT_COLUMNS, UNIT_COLUMNS, num, LENGTH)
    x, y = (columns[:, start : start + num * LENGTH].reshape(shape) for start in (0, 1))
    return x.transpose(1, 2).flatten(0, 1).contiguous(), y.transpose(1, 2).flatten(0, 1).contiguous()


TASK = Task(
    name="wikitext2",
    title="WikiText-2, LSTM",
    # Batches are counted in units: 4 of them are the paper's 16 columns.
    settings=Settings(workers=4, batch_size=4, epochs=50, lr=5.0, momentum=0.9, schedule="step:10:0.1"),
    load=load,
    needs=("wikitext-2",),
)

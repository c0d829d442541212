"""WikiText-2, word by word, with a small LSTM.

16 columns run through the text. A unit is 35 words of 4 columns, and a step takes 4 units: the paper's 4 workers.

The variant `published` does what the code behind the paper's figure did. Worker `w` owns the columns `4w` to `4w + 3`.
The hidden state is zero at the start of an epoch and then goes from the unit a worker visits to the one it visits next,
whatever its place in the text. The gradient of a step is clipped; signs come from unclipped gradients. The variant
`plain` does what the paper's table says: no clipping. There every unit starts with a state of zeros, and any worker may
own it. The others take one of these away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import device_of, seeded
from cdgrab_experiments.tasks.wikitext2_rows import SideBySide, unit_rows

COLUMNS, UNIT_COLUMNS, LENGTH = 16, 4, 35
WIDTH, LAYERS = 32, 2
GROUPS = COLUMNS // UNIT_COLUMNS
# Evaluation reads several columns at once, for speed; each of them starts cold once.
EVAL_COLUMNS, TRAIN_COLUMNS = 16, 128
EVAL_WORDS = {"cpu": 128, "cuda": 8960}  # at a time: on a CPU, their scores should stay in cache

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """How the text is trained on.

    Attributes:
        clip: Largest norm of the gradient of a step; None for no limit.
        carried: Units continue the hidden state that the last visited unit of their columns left.
        contiguous: Workers own columns. Otherwise units are dealt to them at random.
    """

    clip: float | None
    carried: bool
    contiguous: bool


VARIANTS = {
    "published": Options(clip=0.25, carried=True, contiguous=True),
    "unclipped": Options(clip=None, carried=True, contiguous=True),
    "zero-state": Options(clip=0.25, carried=False, contiguous=True),
    "plain": Options(clip=None, carried=False, contiguous=False),
}


class LanguageModel(nn.Module):
    """Embedding, LSTM, and a decoder with the embedding's weight and no bias: dim 1,081,792 for 33,278 words.

    Attributes:
        carried: The state that the last visited unit of each group of columns left. It is written in place, so that a
            recorded step finds it; nothing reads a number on the host.
    """

    carried: Tensor  # 2 x layers x groups x columns of a unit x width
    groups: Tensor

    def __init__(self, num_words: int, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.embedding = nn.Embedding(num_words, WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
            self.decoder = nn.Linear(WIDTH, num_words, bias=False)
            nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.decoder.weight = self.embedding.weight
        self.register_buffer("carried", torch.zeros(2, LAYERS, GROUPS, UNIT_COLUMNS, WIDTH), persistent=False)
        self._side_by_side: dict[int, SideBySide] = {}  # by the number of units
        self.register_buffer("groups", torch.arange(GROUPS), persistent=False)

    def forward(self, tokens_NT: Tensor, group_U: Tensor | None = None) -> Tensor:
        """Scores of the next word at every position.

        Args:
            tokens_NT: One column after the other.
            group_U: The group of every unit, whose state it continues; None to begin with an empty state.
        """
        if group_U is None:
            scores: Tensor = self.decoder(self.lstm(self.embedding(tokens_NT))[0])
            return scores
        h, c = self.carried.index_select(2, group_U).flatten(2, 3)
        scores, state = self.go_on(tokens_NT, (h, c))
        self._keep(group_U, torch.stack(state).detach().unflatten(2, (len(group_U), UNIT_COLUMNS)))
        return scores

    def go_on(self, tokens_NT: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The same from a state, and the state it leaves."""
        hidden, state = self.lstm(self.embedding(tokens_NT), state)
        return self.decoder(hidden), state

    def unit_rows(self, x_Uct: Tensor, y_Uct: Tensor, group_U: Tensor | None = None, *, rows: Tensor) -> None:
        """Fill `rows` with the gradient of every unit, from one backward pass."""
        num = len(x_Uct)
        if num not in self._side_by_side:
            self._side_by_side[num] = SideBySide(self.lstm, num)
        if group_U is None:
            state_2LUcw = self.carried.new_zeros(2, LAYERS, num, *self.carried.shape[3:])
        else:
            state_2LUcw = self.carried.index_select(2, group_U)
        left = unit_rows(self.embedding.weight, self._side_by_side[num], x_Uct, y_Uct, state_2LUcw, rows)
        if group_U is not None:
            self._keep(group_U, left)

    def forget(self) -> None:
        """Let the next unit of every group start with a state of zeros."""
        self.carried.zero_()

    def _keep(self, group_U: Tensor, state_2LUcw: Tensor) -> None:
        left = self.carried
        for group, state in zip(group_U, state_2LUcw.split(1, 2), strict=True):
            left = torch.where((self.groups == group)[:, None, None], state, left)
        self.carried.copy_(left)


def loss(model: nn.Module, x_Uct: Tensor, y_Uct: Tensor) -> Tensor:
    """Mean over all words; units are of equal length, so it is the mean over units too."""
    return F.cross_entropy(model(x_Uct.flatten(0, 1)).flatten(0, 1), y_Uct.flatten())


def carried_loss(model: nn.Module, x_Uct: Tensor, y_Uct: Tensor, group_U: Tensor) -> Tensor:
    """The same of units that continue the state of their group, and leave theirs."""
    return F.cross_entropy(model(x_Uct.flatten(0, 1), group_U).flatten(0, 1), y_Uct.flatten())


def mean_loss(model: LanguageModel, tokens: Tensor, columns: int, length: int | None = None) -> float:
    """Of every word but the first, in the order of the text; columns carry their state.

    Args:
        model: It is not changed.
        tokens: The text.
        columns: Into how many pieces it is cut, which are read side by side.
        length: How many words of a column are read at a time; it changes nothing but the time and memory it takes.
    """
    device = device_of(model)
    length = length or max(1, EVAL_WORDS[device.type] // columns)
    num = len(tokens) - 1
    padding = -num % columns
    inputs = F.pad(tokens[:-1], (0, padding)).view(columns, -1).to(device)
    targets = F.pad(tokens[1:], (0, padding), value=-100).view(columns, -1).to(device)
    total, state = torch.zeros((), dtype=torch.float64, device=device), None
    with torch.no_grad():
        for x, y in zip(inputs.split(length, 1), targets.split(length, 1), strict=True):
            scores, state = model.go_on(x, state)
            total += F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
    return float(total) / num


def perplexities(model: LanguageModel, test: Tensor, valid: Tensor) -> dict[str, float]:
    """Exponentials of the mean loss over every word but the first.

    `test_perplexity_published` is that of the authors' code, which divides the sum over chunks by one chunk too few.
    """
    of_test = mean_loss(model, test, EVAL_COLUMNS)
    chunks = (len(test) // EVAL_COLUMNS - 1) // LENGTH
    return {
        "test_perplexity": _exp(of_test),
        "valid_perplexity": _exp(mean_loss(model, valid, EVAL_COLUMNS)),
        "test_perplexity_published": _exp(of_test * chunks / max(1, chunks - 1)),
    }


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def words(text: str) -> list[str]:
    """Every line ends with a word of its own."""
    return [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), "<eos>")]


def load(folder: Path, variant: str, seed: int) -> Problem:
    """The vocabulary is that of all three files, in the order of first occurrence; all of it occurs in training."""
    options = VARIANTS[variant]
    found = data.find("wikitext-2", folder)
    texts = {split: words(found.text(f"wiki.{split}.tokens")) for split in ("train", "valid", "test")}
    vocabulary: dict[str, int] = {}
    for text in texts.values():
        for word in text:
            vocabulary.setdefault(word, len(vocabulary))
    train, valid, test = (torch.tensor([vocabulary[word] for word in text]) for text in texts.values())
    x, y = units(train, even=options.contiguous)
    if not len(x) or min(len(valid), len(test)) < 2:
        raise found.damaged("wiki.train.tokens", f"has {len(train):,} words, which is too few for the first units")
    group = torch.arange(GROUPS).repeat_interleave(len(x) // GROUPS)
    left_out = len(train) - 1 - y.numel()
    return Problem(
        model=LanguageModel(len(vocabulary), seed),
        train=(x, y, group) if options.carried else (x, y),
        loss=carried_loss if options.carried else loss,
        evaluate=lambda model: perplexities(_ours(model), test, valid),
        metric="test_perplexity",
        higher_is_better=False,
        data=f"WikiText-2: {len(train):,} / {len(valid):,} / {len(test):,} words, {len(vocabulary):,} different; "
        f"{len(x):,} units of {UNIT_COLUMNS} x {LENGTH} ({left_out} words at the ends of columns are left out)"
        f"{found.note}",
        examples=UNIT_COLUMNS,
        unit_rows=lambda model, *batch, rows: _ours(model).unit_rows(*batch, rows=rows),
        shards=GROUPS if options.contiguous else None,
        clip=options.clip,
        start_epoch=(lambda model: _ours(model).forget()) if options.carried else None,
        whole_loss=(lambda model: mean_loss(_ours(model), train, TRAIN_COLUMNS)) if options.carried else None,
    )


def _ours(model: nn.Module) -> LanguageModel:
    assert isinstance(model, LanguageModel)
    return model


def units(tokens: Tensor, *, even: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each `units x 4 x 35`, group by group; the targets are one word ahead.

    Args:
        tokens: The text.
        even: Leave out the last unit of every group if there are oddly many, so that all have partners.
    """
    columns = tokens[: len(tokens) // COLUMNS * COLUMNS].view(COLUMNS, -1)
    num = (columns.shape[1] - 1) // LENGTH
    num -= num % 2 if even else 0
    shape = (GROUPS, UNIT_COLUMNS, num, LENGTH)
    x, y = (columns[:, start : start + num * LENGTH].reshape(shape) for start in (0, 1))
    return x.transpose(1, 2).flatten(0, 1).contiguous(), y.transpose(1, 2).flatten(0, 1).contiguous()


TASK = Task(
    name="wikitext2",
    title="WikiText-2, LSTM",
    # Batches are counted in units: 4 of them are the paper's 16 columns.
    settings=Settings(workers=4, batch_size=4, epochs=50, lr=5.0, momentum=0.9, schedule="step:10:0.1"),
    load=load,
    needs=("wikitext-2",),
    variants=tuple(VARIANTS),
)

"""A table that is looked up, is also a linear layer, and is looked up once more; its rows and their sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _models import one_by_one
from cdgrab.sources.rows import ExampleRows


class TiedTable(nn.Module):
    """Without `answers` the linear layer has no part in the loss."""

    def __init__(self, words: int, answers: bool) -> None:
        super().__init__()
        self.table, self.head, self.out = nn.Embedding(words, 4), nn.Linear(4, words, bias=False), nn.Linear(4, 3)
        self.head.weight = self.table.weight
        self.answers = answers

    def forward(self, index: Tensor) -> Tensor:
        scores = self.head(self.table(index))
        again = self.table(scores.argmax(-1) if self.answers else index)
        return self.out(again.sum(1) + (scores[:, :, :4].tanh().sum(1) if self.answers else 0.0))  # type: ignore[no-any-return]


def check_tied_table(words: int, answers: bool, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
    """Rows, which have the table's transpose if there are many words, and their sum, against single backward passes."""
    torch.manual_seed(2)
    model = TiedTable(words, answers).to(dtype)
    x, y = torch.randint(words, (6, 3)), torch.arange(6) % 3
    expected = one_by_one(model, x, y)
    total = expected.sum(0)
    model, x, y = model.to(device), x.to(device), y.to(device)
    rows_of = ExampleRows(model)
    assert rows_of.turned == ({"table.weight"} if words == 80 else set())
    if rows_of.turned:
        expected[:, : 4 * words] = expected[:, : 4 * words].view(6, words, 4).mT.flatten(1)
    for _ in range(2):  # the first is held against a whole pass
        sums = torch.full((4 * words + 15,), torch.nan, dtype=dtype, device=device)
        found = rows_of(lambda: F.cross_entropy(model(x), y), 6, sums_D=sums)
        torch.testing.assert_close(6 * found.cpu(), expected)
        torch.testing.assert_close(6 * sums.cpu(), total)

"""Libraries that make their loader themselves (skorch), and loaders that keep a position (torchdata)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import cdgrab
from _inputs import randn


class Recorded(nn.Module):
    """Keeps what arrives in training: the first column numbers the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        return self.layer(x)  # type: ignore[no-any-return]


def test_skorch() -> None:
    skorch = pytest.importorskip("skorch")
    x = np.concatenate([np.arange(22)[:, None], randn(22, 2).numpy()], axis=1).astype(np.float32)
    ordering = cdgrab.Ordering(len(x), batch_size=4)
    net: Any = skorch.NeuralNetClassifier(
        Recorded,
        criterion=nn.CrossEntropyLoss,
        batch_size=4,
        iterator_train__sampler=ordering.sampler,
        train_split=None,
        verbose=0,
        lr=0.001,
    )
    net.initialize()
    ordering.attach(net.module_)
    net.partial_fit(x, np.arange(22) % 2, epochs=3)
    seen = net.module_.seen
    epochs = [seen[start : start + 22] for start in range(0, len(seen), 22)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(22))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert ordering.epoch == 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("workers_then", [0, 2])
def test_stateful_loaders_go_on_by_the_state_of_the_ordering(workers: int, workers_then: int) -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader")
    data = TensorDataset(torch.arange(22), randn(22, 3))
    given = loading.StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers, snapshot_every_n_steps=2)
    ordering, found = cdgrab.ordered(given)
    loader: Any = found
    assert type(loader) is loading.StatefulDataLoader
    assert loader.snapshot_every_n_steps == 2
    seen: list[int] = []
    for number, (index, rows) in enumerate(loader):
        if number == 3:
            break
        ordering.observe(rows)
        seen += index.tolist()
    state = ordering.state_dict()
    resumed, loader = cdgrab.ordered(loading.StatefulDataLoader(data, batch_size=4, num_workers=workers_then))
    resumed.load_state_dict(state)
    for index, rows in loader:
        resumed.observe(rows)
        seen += index.tolist()
    assert sorted(seen) == list(range(22))
    assert resumed.epoch == 1


def test_deepspeed_with_zero_3_is_refused() -> None:
    """DeepSpeed gives parameters that it has split a number of its own."""
    model = nn.Linear(3, 2)
    setattr(model.weight, "ds_id", 0)  # noqa: B010
    with pytest.raises(ValueError, match=r"Linear is split by DeepSpeed's ZeRO-3.*use ZeRO 0 to 2, or fully_shard"):
        cdgrab.Ordering(8, batch_size=2).attach(model)

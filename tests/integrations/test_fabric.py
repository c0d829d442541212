"""Lightning Fabric."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from _inputs import randn
from cdgrab.integrations.fabric import balance
from integrations._promises import check_example

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own, while it is imported
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example(ranks: int, tmp_path: Path) -> None:
    more, saved_at = ["--devices", str(ranks)], 60 // ranks + 20
    check_example("with_fabric", *more, folder=tmp_path, examples=480, saved_at=saved_at, ranks=ranks)


def test_fabric_sets_no_epoch_and_loaders_set_up_before_are_refused() -> None:
    fabric, data = Fabric(accelerator="cpu"), TensorDataset(torch.arange(22), randn(22, 3))
    given = DataLoader(data, batch_size=4, shuffle=True)
    model = fabric.setup(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"a _FabricDataLoader; pass it as it was before fabric\.setup_dataloaders"):
        balance(fabric, model, fabric.setup_dataloaders(given))
    ordering, loader = balance(fabric, model, given)
    assert len(loader) == 6
    for _ in range(2):  # evaluations: Fabric counts two epochs
        for _ in loader:
            pass
    seen: list[int] = []
    for number, (index, x) in enumerate(loader):
        if number == 3:
            break
        fabric.backward(model(x).square().mean())
        seen += index.tolist()
    assert (ordering.epoch, ordering.examples_left) == (0, 10)
    for index, x in loader:
        fabric.backward(model(x).square().mean())
        seen += index.tolist()
    assert sorted(seen) == list(range(22))
    assert ordering.epoch == 1

"""Lightning's Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from _inputs import randn
from integrations._promises import check_example

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own, while it is imported
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    from cdgrab.integrations.lightning import BalancedOrder

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

DATA = TensorDataset(torch.arange(22), randn(22, 3))
EVERY = list(range(22))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example(ranks: int, tmp_path: Path) -> None:
    more = ["--devices", str(ranks)]
    check_example("with_lightning", *more, folder=tmp_path, examples=480, saved_at=80, ranks=ranks)


class Watched(LightningModule):
    """Keeps what arrives in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.batches = nn.Linear(3, 2), list[list[int]]()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # noqa: ARG002
        self.batches.append(batch[0].tolist())
        return self.net(batch[1]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Module(Watched):
    def train_dataloader(self) -> Any:
        return loader()


class Validated(Watched):
    def validation_step(self, batch: list[Tensor], index: int) -> None:
        assert batch[0].tolist() == list(range(4 * index, min(22, 4 * index + 4)))


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=4)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, **{"shuffle": True, **options})


def trainer_with(*callbacks: Any, **options: Any) -> Trainer:
    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), **{**plain, **options})


def epochs_of(model: Watched) -> list[list[int]]:
    arrived = [index for batch in model.batches for index in batch]
    return [arrived[start : start + 22] for start in range(0, len(arrived), 22)]


@pytest.mark.parametrize("source", ["fit", "module", "datamodule", "reloaded", "workers"])
def test_every_example_once_from_wherever_the_loader_comes(source: str) -> None:
    models = {"module": Module, "reloaded": Module, "datamodule": Validated}
    model = models.get(source, Watched)()
    more = {"reload_dataloaders_every_n_epochs": 1} if source == "reloaded" else {}
    callback = BalancedOrder(seed=2)
    given: dict[str, Any] = {"datamodule": Data()} if source == "datamodule" else {}
    if source in ("fit", "workers"):
        given["train_dataloaders"] = loader(num_workers=2 if source == "workers" else 0)
    trainer_with(callback, **more).fit(model, **given)
    epochs = epochs_of(model)
    assert [sorted(epoch) for epoch in epochs] == [EVERY] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert callback.ordering is not None
    assert (callback.ordering.epoch, callback.ordering.seed) == (3, 2)
    assert not any(part._forward_hooks for part in model.modules())  # the model is left as it was


@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_in_the_middle_of_an_epoch(workers: int, tmp_path: Path) -> None:
    straight, resumed = Watched(), Watched()
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
    trainer_with(saving, BalancedOrder()).fit(straight, loader())
    trainer = trainer_with(saving, BalancedOrder())
    trainer.fit(resumed, loader(num_workers=workers), ckpt_path=str(tmp_path / "step=8.ckpt"))
    assert resumed.batches == straight.batches[8:]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_figures_come_once_an_epoch(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer_with(BalancedOrder(), logger=logger, log_every_n_steps=1).fit(Watched(), loader())
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("cdgrab/epoch")
    assert [line.split(",")[column] for line in lines[1:]] == ["0.0", "1.0", "2.0"]
    assert "cdgrab/imbalance" in lines[0]


def test_a_second_fit_begins_anew() -> None:
    callback, model = BalancedOrder(), Watched()
    trainer_with(callback).fit(model, loader())
    first = callback.ordering
    trainer_with(callback, max_epochs=1).fit(model, loader())
    assert callback.ordering is not first
    assert callback.ordering is not None
    assert callback.ordering.epoch == 1


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 22, 22)}, "WeightedRandomSampler, whose choice of examples"),
        ({"in_order": False}, "in_order=False, so batches overtake each other"),
    ],
    ids=["weighted", "out of order"],
)
def test_what_cannot_be_balanced(loaders: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_with(BalancedOrder()).fit(Watched(), loader(**{"shuffle": None, **loaders}))


class Growing(Watched):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*(part[: 12 + 4 * self.current_epoch] for part in DATA.tensors)), batch_size=4)


def test_a_loader_that_changes() -> None:
    with pytest.raises(ValueError, match=r"reloaded with 16 examples, and the order is one of 12; leave out reload_"):
        trainer_with(BalancedOrder(), reload_dataloaders_every_n_epochs=1).fit(Growing())


def test_several_loaders() -> None:
    with pytest.raises(ValueError, match=r"several training loaders.*concatenate the datasets"):
        trainer_with(BalancedOrder()).fit(Watched(), [loader(), loader()])

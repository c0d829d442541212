"""Balanced data ordering with Lightning (pip install pytorch-lightning), on one device or on many, with checkpoints.

    python examples/with_lightning.py [--devices 2] [--resume CHECKPOINT]

The lines marked `cdgrab` are all it takes. They stand where Lightning has made what they need: the process group when
it asks for the loader, the wrapped model when training starts.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cdgrab  # cdgrab


def make_data() -> TensorDataset:
    """The same on every rank."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(2000, 32, generator=draws)
    return TensorDataset(inputs, (inputs @ torch.randn(32, 5, generator=draws)).argmax(1))


class Classifier(pl.LightningModule):
    """A small network whose examples come in a balanced order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))
        self.losses: list[Tensor] = []
        self.saved: dict[str, Any] | None = None  # cdgrab: the ordering of a checkpoint

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = make_data()
        self.ordering = cdgrab.Ordering(dataset, batch_size=8, seed=0)  # cdgrab
        return DataLoader(dataset, batch_size=8, sampler=self.ordering.sampler)  # was: shuffle=True

    def on_train_start(self) -> None:
        assert self.trainer.model is not None
        self.ordering.attach(self.trainer.model)  # cdgrab
        if self.saved is not None:  # cdgrab
            self.ordering.load_state_dict(self.saved)  # cdgrab

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ordering"] = self.ordering.state_dict()  # cdgrab: that of all ranks

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["ordering"]  # cdgrab

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # noqa: ARG002
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        loss, self.losses = torch.stack(self.losses).mean(), []
        imbalance = self.ordering.metrics()["imbalance"]
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: loss {loss:.4f}, imbalance {imbalance:.3f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", help="a checkpoint that Lightning has written")
    parser.add_argument("--folder", default="results/lightning", help="where checkpoints go")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)  # the same model on every rank
    trainer = pl.Trainer(
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=options.epochs,
        callbacks=[ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), ckpt_path=options.resume)


if __name__ == "__main__":
    main()

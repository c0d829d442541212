"""Balanced data ordering with Lightning, on one device or on many, with checkpoints.

    python examples/with_lightning.py [--devices 2] [--resume]

The lines marked `cdgrab` are all it takes. The figures of each epoch are logged, as `cdgrab/imbalance` and so on.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cdgrab.integrations.lightning import BalancedOrder  # cdgrab


class Classifier(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # noqa: ARG002
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: loss {found['loss']:.6f}, imbalance {found['cdgrab/imbalance']:.4f}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", default="results/lightning")
    parser.add_argument("--resume", action="store_true", help="go on from step 80")
    options = parser.parse_args()
    seed_everything(0, verbose=False)  # the same data and the same model on every rank
    inputs = torch.randn(480, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :5].argmax(1)), batch_size=8, shuffle=True)
    checkpoints = ModelCheckpoint(options.folder, filename="{step}", every_n_train_steps=80, save_top_k=-1)
    callbacks: list[Any] = [checkpoints, BalancedOrder()]  # cdgrab
    strategy = "ddp" if options.devices > 1 else "auto"
    trainer = Trainer(devices=options.devices, strategy=strategy, max_epochs=4, callbacks=callbacks, logger=False)
    trainer.fit(Classifier(), loader, ckpt_path=f"{options.folder}/step=80.ckpt" if options.resume else None)


if __name__ == "__main__":
    main()

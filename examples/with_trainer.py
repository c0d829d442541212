"""Balanced data ordering with the Hugging Face Trainer, in one process or on many, with checkpoints.

    python examples/with_trainer.py [--resume]
    torchrun --nproc-per-node=2 examples/with_trainer.py [--resume]

The lines marked `cdgrab` are all it takes. The figures of each epoch come in the Trainer's log.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from cdgrab.integrations.transformers import BalancedOrder  # cdgrab


class Classifier(nn.Module):
    """Finds its own loss, as models for the Trainer do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="results/trainer")
    parser.add_argument("--resume", action="store_true", help="go on from step 40")
    options = parser.parse_args()
    inputs = torch.randn(480, 32, generator=torch.manual_seed(0))  # the same data and model on every rank
    dataset: Any = [{"inputs": x, "labels": y} for x, y in zip(inputs, inputs[:, :5].argmax(1), strict=True)]
    arguments = TrainingArguments(
        output_dir=options.folder,
        num_train_epochs=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=5,
        save_steps=40,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=dataset, callbacks=[BalancedOrder()])  # cdgrab
    trainer.train(resume_from_checkpoint=f"{options.folder}/checkpoint-40" if options.resume else None)
    for logged in trainer.state.log_history:
        if "cdgrab/imbalance" in logged and trainer.is_world_process_zero():
            print(f"epoch {logged['epoch']:.0f}: loss {logged['loss']:.6f}, imbalance {logged['cdgrab/imbalance']:.4f}")


if __name__ == "__main__":
    main()

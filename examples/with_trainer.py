"""Balanced data ordering with the Hugging Face Trainer, in one process or on many, with checkpoints.

    python examples/with_trainer.py [--resume CHECKPOINT]
    torchrun --nproc-per-node=2 examples/with_trainer.py [--resume CHECKPOINT]

Needs transformers and accelerate. The lines marked `cdgrab` are all it takes. The loader is made here and not prepared
by Accelerate, which would deal the batches out once more; the model is attached when the Trainer has wrapped it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import cdgrab  # cdgrab


class Examples(Dataset[dict[str, Tensor]]):
    """The same on every rank."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(2000, 32, generator=draws)
        self.labels = (self.inputs @ torch.randn(32, 5, generator=draws)).argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """A small network that finds its own loss, as models for the Trainer do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


class OrderedTrainer(Trainer):
    """Visits examples in a balanced order."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        dataset, size = Examples(), self.args.per_device_train_batch_size
        self.ordering = cdgrab.Ordering(dataset, batch_size=size, seed=0)  # cdgrab
        self.attached = False  # cdgrab
        if self.args.resume_from_checkpoint:  # cdgrab: before the first batch is asked for
            self.ordering.load_state_dict(torch.load(self.saved_ordering(self.args.resume_from_checkpoint)))  # cdgrab
        return DataLoader(dataset, batch_size=size, sampler=self.ordering.sampler)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if not self.attached:  # cdgrab
            self.ordering.attach(model)  # cdgrab
            self.attached = True  # cdgrab
        return super().training_step(model, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        path = self.saved_ordering(output_dir or self.args.output_dir or ".")  # cdgrab
        path.parent.mkdir(parents=True, exist_ok=True)  # cdgrab: the first rank may still be about to
        torch.save(self.ordering.state_dict(), path)  # cdgrab

    def saved_ordering(self, folder: str) -> Path:
        """Every rank has one of its own."""
        return Path(folder) / f"ordering-{self.args.process_index}.pt"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        imbalance = self.ordering.metrics().get("imbalance", float("nan"))
        if self.is_world_process_zero() and "loss" in logs:
            epoch = round(self.state.epoch or 0) - 1
            print(f"epoch {epoch}: loss {float(logs['loss']):.4f}, imbalance {imbalance:.3f}", flush=True)


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", help="a checkpoint that the Trainer has written")
    parser.add_argument("--folder", default="results/trainer", help="where checkpoints go")
    options = parser.parse_args()
    torch.manual_seed(0)  # the same model on every rank
    arguments = TrainingArguments(
        output_dir=options.folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ignore_data_skip=True,  # cdgrab: the ordering knows what is left of an epoch
        resume_from_checkpoint=options.resume,
    )
    trainer = OrderedTrainer(model=Classifier(), args=arguments)
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()

"""Balanced data ordering with Hugging Face Accelerate, in one process or on many, with checkpoints.

    python examples/with_accelerate.py [--resume]
    accelerate launch --cpu --num_processes 2 examples/with_accelerate.py [--resume]

The lines marked `cdgrab` are all it takes. The order is saved and loaded with the accelerator's state.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cdgrab.integrations.accelerate import balance  # cdgrab


def main() -> None:
    """Train a small classifier for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", default="results/accelerate", help="where the checkpoint goes")
    parser.add_argument("--resume", action="store_true", help="go on from batch 20 of epoch 1")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)  # the same data and the same model on every rank
    inputs = torch.randn(480, 32)
    dataset = TensorDataset(inputs, (inputs @ torch.randn(32, 5)).argmax(1))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ordering = balance(accelerator, model, loader)  # cdgrab
    if options.resume:
        accelerator.load_state(options.folder)

    for epoch in range(ordering.epoch, options.epochs):
        losses = []
        for batch, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if (epoch, batch) == (1, 19) and not options.resume:
                accelerator.save_state(options.folder)
        accelerator.print(f"epoch {epoch}: last loss {losses[-1]:.6f}, imbalance {ordering.metrics()['imbalance']:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Balanced data ordering with Lightning Fabric, on one device or on many, with a checkpoint.

    python examples/with_fabric.py [--devices 2] [--resume]

The lines marked `cdgrab` are all it takes. The order is saved with model and optimizer.
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cdgrab.integrations.fabric import balance  # cdgrab


def main() -> None:
    """Train a small classifier for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", default="results/fabric")
    parser.add_argument("--resume", action="store_true", help="go on from batch 20 of epoch 1")
    options = parser.parse_args()
    fabric = Fabric(devices=options.devices, strategy="ddp" if options.devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0)  # the same data and the same model on every rank
    inputs = torch.randn(480, 32)
    dataset = TensorDataset(inputs, inputs[:, :5].argmax(1))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))
    net, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    ordering, loader = balance(fabric, net, DataLoader(dataset, batch_size=8, shuffle=True))  # cdgrab
    state = {"model": net, "optimizer": optimizer, "ordering": ordering}  # cdgrab
    path = f"{options.folder}/fabric.ckpt"
    if options.resume:
        fabric.load(path, state)

    for epoch in range(ordering.epoch, 4):
        for batch, (x, y) in enumerate(loader):
            if (epoch, batch) == (1, 20) and not options.resume:
                fabric.save(path, state)
            loss = nn.functional.cross_entropy(net(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        imbalance = ordering.metrics()["imbalance"]
        fabric.print(f"epoch {epoch}: last loss {fabric.all_reduce(loss):.6f}, imbalance {imbalance:.4f}")


if __name__ == "__main__":
    main()

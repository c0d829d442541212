"""Order single examples of a small classifier in one process, and compare with random reshuffling.

python examples/one_process.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cdgrab


def train(order: str, epochs: int = 12) -> float:
    """Train with plain SGD and return the final training loss."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    dataset, model, loss_fn = TensorDataset(x, y), nn.Linear(16, 4), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-2)

    ordering = cdgrab.Ordering(dataset, batch_size=4, order=order, seed=0)
    loader = DataLoader(dataset, batch_size=4, sampler=ordering.sampler)
    for _ in range(epochs):
        for inputs, targets in loader:
            rows = cdgrab.per_example_grads(model, loss_fn, inputs, targets)
            ordering.observe(rows)
            cdgrab.set_flat_grad(model, rows.mean(0))
            optimizer.step()
    with torch.no_grad():
        return float(loss_fn(model(x), y))


if __name__ == "__main__":
    for order in ("rr", "cd-grab"):
        print(f"{order:8} final loss {train(order):.5f}")

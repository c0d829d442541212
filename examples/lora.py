"""Fine-tune adapters of low rank beside a frozen network, with single examples in a balanced order.

python examples/lora.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cdgrab


class Adapted(nn.Module):
    """A frozen layer and a trainable correction of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # begins as the frozen layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.frozen(x) + self.up(self.down(x))
        return output


def train(order: str, epochs: int = 15) -> float:
    """Fine-tune and return the final training loss."""
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    y = torch.tanh(x @ torch.randn(32, 32) / 6) @ torch.randn(32, 4)
    dataset, labels = TensorDataset(x, y.argmax(1)), y.argmax(1)
    pretrained = [nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 4)]
    model = nn.Sequential(Adapted(pretrained[0]), nn.Tanh(), Adapted(pretrained[1]), nn.Tanh(), Adapted(pretrained[2]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    ordering = cdgrab.Ordering(dataset, batch_size=4, order=order, seed=0)
    loader = DataLoader(dataset, batch_size=4, sampler=ordering.sampler)
    ordering.attach(model)  # only what is trained is balanced
    if order == "cd-grab":
        print(ordering.explain(model, x[:4]))
    for _ in range(epochs):
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), labels))


if __name__ == "__main__":
    for order in ("rr", "cd-grab"):
        print(f"{order:8} final loss {train(order):.5f}")

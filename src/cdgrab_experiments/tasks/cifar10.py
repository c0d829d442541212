"""CIFAR-10 with LeNet: the paper's comparison over many workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import classifier_figures, cross_entropy, seeded

TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
SHAPE = (3, 32, 32)
# Of each colour over the training set, as commonly used (and by the authors).
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Standardise(nn.Module):
    """From bytes to numbers about zero, here and not beforehand: images in memory then take a quarter of the room."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("scale", 1 / (255 * torch.tensor(deviation)).view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", (-torch.tensor(mean) / torch.tensor(deviation)).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Channels come second."""
        return x * self.scale + self.shift


def lenet(seed: int) -> nn.Sequential:
    """Dim 62,006. The authors' third convolution sees its whole input at once, so it is a linear layer here."""
    with seeded(seed):
        return nn.Sequential(
            Standardise(MEAN, DEVIATION),
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Images stay bytes; the model takes them."""
    found = data.find("cifar-10", folder)
    parts = [_read(found, name) for name in TRAIN]
    x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    test_x, test_y = _read(found, TEST)
    return Problem(
        model=lenet(seed),
        train=(x, y),
        loss=cross_entropy,
        evaluate=classifier_figures(test_x, test_y),
        metric="accuracy",
        higher_is_better=True,
        data=f"{_kind(found)}: {len(x):,} / {len(test_x):,} images of 32 x 32",
        labels=y,
    )


def _read(found: data.Found, name: str) -> tuple[Tensor, Tensor]:
    """The binary version: a byte for the class, then 1,024 each for red, green and blue."""
    record = 1 + SHAPE[0] * SHAPE[1] * SHAPE[2]
    content = np.frombuffer(found.read(name), dtype=np.uint8)
    if not len(content) or len(content) % record:
        raise found.damaged(name, f"has {len(content):,} bytes, which is no multiple of {record:,}")
    records = torch.from_numpy(content.reshape(-1, record).copy())
    if int(records[:, 0].max()) > 9:
        raise found.damaged(name, f"has an image of class {int(records[:, 0].max())}; there are 0 to 9")
    return records[:, 1:].reshape(-1, *SHAPE).contiguous(), records[:, 0].long()


def _kind(found: data.Found) -> str:
    """Whether these are the original pixels, which only a hash can tell."""
    if all(found.original(name) for name in (*TRAIN, TEST)):
        return "CIFAR-10"
    note = found.paths[TEST].with_name("NOTE.txt")
    if note.exists() and "JPEG" in note.read_text():
        return "CIFAR-10, JPEG re-coded, not pixel-exact"
    return "CIFAR-10, not the original files (their SHA-256 differs)"


TASK = Task(
    name="cifar10",
    title="CIFAR-10, LeNet",
    settings=Settings(workers=64, batch_size=64, epochs=100, lr=1e-3, momentum=0.9, weight_decay=1e-2),
    load=load,
    needs=("cifar-10",),
)

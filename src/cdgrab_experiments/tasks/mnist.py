"""MNIST with a small network of one hidden layer.

Not in the paper. Layers without positions are where exact balancing of single examples is cheapest, and CIFAR-10 has
the convolutions already.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.cifar10 import Standardise
from cdgrab_experiments.tasks.tools import classifier_figures, cross_entropy, seeded

WIDTH = 128
# Over all pixels of the training set.
MEAN, DEVIATION = (0.1307,), (0.3081,)


def network(seed: int, side: int = 28) -> nn.Sequential:
    """Dim 101,770."""
    with seeded(seed):
        return nn.Sequential(
            Standardise(MEAN, DEVIATION),
            nn.Flatten(),
            nn.Linear(side * side, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Images stay bytes; the model takes them."""
    found = data.find("mnist", folder)
    (x, y), (test_x, test_y) = (_read(found, split) for split in ("train", "t10k"))
    return Problem(
        model=network(seed, x.shape[-1]),
        train=(x, y),
        loss=cross_entropy,
        evaluate=classifier_figures(test_x, test_y),
        metric="accuracy",
        higher_is_better=True,
        data=f"MNIST: {len(x):,} / {len(test_x):,} images of {x.shape[2]} x {x.shape[3]}{found.note}",
        labels=y,
    )


def _read(found: data.Found, split: str) -> tuple[Tensor, Tensor]:
    images, labels = (_idx(found, f"{split}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or int(labels.max()) > 9:
        shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise found.damaged(f"{split}-labels-idx1-ubyte", f"does not fit the images: shapes {shapes}")
    return images[:, None], labels.long()


def _idx(found: data.Found, name: str) -> Tensor:
    """The IDX format: two zeros, a type (8 is a byte), the number of dimensions, their sizes, the values."""
    content = found.read(name)
    zeros, kind, num = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    sizes = struct.unpack(f">{num}I", content[4 : 4 + 4 * num]) if len(content) >= 4 + 4 * num else ()
    values = np.frombuffer(content[4 + 4 * num :], dtype=np.uint8)
    if (zeros, kind) != (0, 8) or not sizes or len(values) != int(np.prod(sizes)) or not len(values):
        raise found.damaged(name, f"is no IDX file of bytes: sizes {sizes}, {len(values):,} values")
    return torch.from_numpy(values.reshape(sizes).copy())


TASK = Task(
    name="mnist",
    title="MNIST, MLP",
    settings=Settings(workers=16, batch_size=64, epochs=20, lr=0.01, momentum=0.9),
    load=load,
    needs=("mnist",),
)

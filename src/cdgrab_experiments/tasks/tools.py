"""What several tasks share: seeded models, figures of classifiers, logistic regression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments.tasks.base import LateRows, Problem


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Layers made inside begin the same for the same seed; the random numbers of everybody else are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def device_of(model: nn.Module) -> torch.device:
    """Where the model is."""
    return next(model.parameters()).device


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over the examples."""
    return F.cross_entropy(model(x), y)


def classifier_figures(x: Tensor, y: Tensor, batch: int = 1000) -> Callable[[nn.Module], dict[str, float]]:
    """Accuracy and loss on data that are not trained on, in batches that fit anywhere."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        device, loss, right = device_of(model), 0.0, 0
        with torch.no_grad():
            for part_x, part_y in zip(x.split(batch), y.split(batch), strict=True):
                target = part_y.to(device)
                logits = model(part_x.to(device))
                loss += float(F.cross_entropy(logits, target, reduction="sum"))
                right += int((logits.argmax(1) == target).sum())
        return {"accuracy": right / len(y), "test_loss": loss / len(y)}

    return evaluate


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """How often a positive example scores higher than a negative one; ties count half."""
    scores, labels = scores.cpu().double(), labels.cpu().bool()
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def matthews(predicted: Tensor, labels: Tensor) -> float:
    """Matthews' correlation of two classes; 0 where one of them never occurs."""
    a, b = predicted.cpu().double(), labels.cpu().double()
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else 0.0


def f1_score(predicted: Tensor, labels: Tensor) -> float:
    """Of class 1."""
    both = float(((predicted == 1) & (labels == 1)).sum())
    either = float((predicted == 1).sum() + (labels == 1).sum())
    return 2 * both / either if either else 0.0


def logistic_regression(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, l2: float, seed: int, data: str
) -> Problem:
    """Two classes, 0 and 1; `l2 / 2 * ||weights||^2` is a part of the loss.

    The intercept is the last weight, for a column of ones: then the gradient of an example is its features, scaled,
    which is a handful of operations.
    """
    (x, y), (test_x, test_y) = ((torch.cat([x, torch.ones(len(x), 1)], 1), y.float()) for x, y in (train, test))
    with seeded(seed):
        model = nn.Linear(x.shape[1], 1, bias=False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
        return found + l2 / 2 * next(model.parameters()).square().sum() if l2 else found

    def scaled(kept: tuple[Tensor, ...], x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:  # noqa: ARG001
        if not l2:
            return torch.mul(x, kept[0][..., None], out=out)
        return torch.addcmul(kept[1][..., None, :] * l2, x, kept[0][..., None], out=out)

    def gradient(
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        rows: Tensor | None = None,
        kept: tuple[Tensor, ...] = (),
    ) -> Tensor:
        weight = next(model.parameters()).detach()[0]
        predicted = torch.sigmoid(torch.mv(x, weight))
        slope = torch.sub(predicted, y, out=kept[0] if kept else predicted)
        found = torch.mv(x.T, slope).div_(len(x))
        if l2:
            found.add_(weight, alpha=l2)
        if l2 and kept:
            kept[1].copy_(weight)
        if rows is not None:
            scaled((slope, weight), x, y, out=rows)
        return found

    def sizes(units: int) -> tuple[tuple[int, ...], ...]:
        return ((units,), (x.shape[1],)) if l2 else ((units,),)

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            logits = model(test_x.to(device_of(model)))[:, 0].cpu()
        return {
            "accuracy": float(((logits > 0) == (test_y > 0.5)).double().mean()),
            "auc": area_under_curve(logits, test_y),
            "test_loss": float(F.binary_cross_entropy_with_logits(logits, test_y)),
        }

    return Problem(
        model=model,
        train=(x, y),
        loss=loss,
        evaluate=evaluate,
        metric="accuracy",
        higher_is_better=True,
        data=data,
        labels=y.long(),
        gradient=gradient,
        late=LateRows(gradient, sizes, scaled),
        minimum=lambda: smallest_logistic_loss(x, y, l2),
    )


def smallest_logistic_loss(x: Tensor, y: Tensor, l2: float) -> float:
    """By Newton's method with halved steps, in double precision."""
    x, y = x.double(), y.double()
    eye = torch.eye(x.shape[1], dtype=torch.float64)

    def value(w: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(x @ w, y) + l2 / 2 * w.square().sum())

    w = x.new_zeros(x.shape[1])
    lowest = value(w)
    for _ in range(100):
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (p - y) / len(x) + l2 * w
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + (l2 + 1e-12) * eye
        step = torch.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-6 and value(w - size * step) > lowest:
            size /= 2
        reached = value(w - size * step)
        if reached > lowest - 1e-15:
            break
        w, lowest = w - size * step, reached
    return lowest

"""The figures of an ordering under the names that loggers see, and one line per epoch for a writer."""

from __future__ import annotations

from typing import Any

from cdgrab.ordering import Ordering


def figures(ordering: Ordering) -> dict[str, float]:
    """`ordering.metrics()` with the prefix `cdgrab/`; empty before the first epoch has ended."""
    found = ordering.metrics()
    return {f"cdgrab/{name}": float(value) for name, value in found.items()} if found["epoch"] >= 0 else {}


def log(ordering: Ordering, writer: Any) -> dict[str, float]:
    """Write the figures of the last finished epoch; call it after every epoch.

    Args:
        ordering: The ordering.
        writer: TensorBoard's `SummaryWriter`; a run of W&B, or `wandb` itself; `mlflow`; a logger of Lightning's; or
            an `Accelerator` with trackers.

    Returns:
        What was written: `cdgrab/imbalance` and so on, as `Ordering.metrics` explains them.
    """
    found = figures(ordering)
    epoch = int(found.get("cdgrab/epoch", 0))
    if hasattr(writer, "add_scalar"):
        for name, value in found.items():
            writer.add_scalar(name, value, epoch)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(found, step=epoch)
    elif callable(getattr(writer, "log", None)):
        writer.log(found)
    else:
        raise ValueError(
            f"log() was given a {type(writer).__name__}; pass a SummaryWriter, a run of W&B, mlflow, a logger of "
            "Lightning's or an Accelerator, or use the dict that ordering.metrics() returns"
        )
    return found


__all__ = ["figures", "log"]

"""One line per epoch in TensorBoard, MLflow, W&B and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cdgrab
from _inputs import randn
from cdgrab.integrations import log

NAMES = {f"cdgrab/{name}" for name in cdgrab.Ordering(8, batch_size=2).metrics()}


def two_epochs(writer: Any) -> list[float]:
    """The imbalance of each epoch."""
    ordering, found = cdgrab.Ordering(8, batch_size=2), []
    assert log(ordering, writer) == {}
    for epoch in range(2):
        for step in range(4):
            ordering.observe(randn(2, 3, seed=4 * epoch + step))
        found.append(log(ordering, writer)["cdgrab/imbalance"])
    return found


class Run:
    """Logs like a run of W&B, which needs an account."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, line: dict[str, float]) -> None:
        if line:
            self.lines.append(line)


def test_a_run() -> None:
    run = Run()
    imbalance = two_epochs(run)
    assert [line["cdgrab/imbalance"] for line in run.lines] == imbalance
    assert [line["cdgrab/epoch"] for line in run.lines] == [0, 1]
    assert all(line.keys() == NAMES for line in run.lines)


def test_what_is_no_writer() -> None:
    with pytest.raises(ValueError, match=r"log\(\) was given a list; pass a SummaryWriter, a run of W&B, mlflow"):
        log(cdgrab.Ordering(8, batch_size=2), [])


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        imbalance = two_epochs(writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    found = [(event.step, event.value) for event in events.Scalars("cdgrab/imbalance")]
    assert found == [(epoch, pytest.approx(value)) for epoch, value in enumerate(imbalance)]


@pytest.mark.filterwarnings("ignore")  # of its own
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        imbalance = two_epochs(mlflow)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "cdgrab/imbalance")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(imbalance))

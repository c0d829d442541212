"""Steps replayed as a graph on a GPU give what eager steps give on the CPU. Skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

from _problems import PROBLEMS, config
from cdgrab.paper.train import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("order", ["rr", "cd-grab", "pair", "id-grab"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_captured_steps(name: str, order: str, optimizer: str) -> None:
    chosen = config(order=order, optimizer=optimizer, lr=0.1 if optimizer == "sgd" else 0.01)
    here = [record.loss for record in Trainer(chosen, PROBLEMS[name](31)).run()]
    for capture in (False, True):
        trainer = Trainer(chosen, PROBLEMS[name](31), device="cuda", capture=capture)
        # In a graph, Adam counts its steps in single precision.
        rel = 1e-5 if capture and optimizer == "adamw" else 1e-9
        assert [record.loss for record in trainer.run()] == pytest.approx(here, rel=rel)


def test_resume_of_captured_steps() -> None:
    straight = Trainer(config(epochs=5), PROBLEMS["layers"](31), device="cuda")
    records = list(straight.run())
    first = Trainer(config(epochs=5), PROBLEMS["layers"](31), device="cuda")
    some = first.run()
    for _ in range(3):
        last = next(some)
    resumed = Trainer(config(epochs=5), PROBLEMS["layers"](31), device="cuda")
    resumed.load_state_dict(first.state_dict(), last)
    assert [r.loss for r in resumed.run()] == pytest.approx([r.loss for r in records[3:]], rel=1e-12)

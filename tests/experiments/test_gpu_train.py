"""Steps replayed as a graph on a GPU give what eager steps give on the CPU. Skipped where there is no CUDA device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import _data
from _problems import PROBLEMS, config
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.runner import Place, run
from cdgrab_experiments.tasks import wikitext2
from cdgrab_experiments.tasks.cifar10 import lenet
from cdgrab_experiments.train import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("order", ["rr", "cd-grab", "pair", "id-grab", "greedy-herding"])
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


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_runs_by_name_of_the_device(device: str, tmp_path: Path) -> None:
    chosen = config(epochs=2, order="cd-grab")
    done = run(chosen, Place(tmp_path, tmp_path, device))
    here = run(chosen, Place(tmp_path / "cpu", tmp_path, "cpu"))
    assert [record.loss for record in done.epochs] == pytest.approx([r.loss for r in here.epochs], rel=1e-4)
    assert done.info.environment["hardware"] == torch.cuda.get_device_name()


def test_captured_sketches() -> None:
    chosen = config(source="sketch:16", epochs=8)
    here = [record.loss for record in Trainer(chosen, PROBLEMS["layers"](31)).run()]
    for capture in (False, True):
        trainer = Trainer(chosen, PROBLEMS["layers"](31), device="cuda", capture=capture)
        assert [record.loss for record in trainer.run()] == pytest.approx(here, rel=1e-9)


@pytest.mark.parametrize("source", ["exact", "sketch:256"])
@pytest.mark.parametrize("order", ["rr", "cd-grab", "id-grab"])
def test_runs_repeat_to_the_bit(order: str, source: str) -> None:
    def parameters() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x, y = lenet(0), torch.randint(0, 256, (500, 3, 32, 32)).byte(), torch.arange(500) % 10
        problem = replace(PROBLEMS["layers"](31), model=model, train=(x, y))
        trainer = Trainer(config(order=order, source=source, batch_size=60, lr=0.01), problem, device="cuda")
        for _ in range(3):
            trainer.epoch()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(parameters(), parameters(), strict=True))


def test_what_goes_on_side_by_side_does_not_get_mixed_up() -> None:
    """A model large enough that rows, steps and the sorter overlap, over hundreds of steps."""
    tokens = torch.randint(0, 3000, (400, 4, 36), generator=torch.Generator().manual_seed(0))

    def trained(device: str) -> tuple[list[float], list[torch.Tensor]]:
        problem = replace(
            PROBLEMS["units"](31),
            model=wikitext2.LanguageModel(3000, 0),
            train=(tokens[..., :-1], tokens[..., 1:]),
            loss=wikitext2.loss,
            examples=4,
        )
        chosen = config(order="cd-grab", workers=2, batch_size=4, lr=0.5, epochs=2)
        losses = [record.loss for record in Trainer(chosen, problem, device=device).run()]
        return losses, [parameter.detach().clone() for parameter in problem.model.parameters()]

    here, _ = trained("cpu")  # one after the other
    (first, parameters), (second, again) = trained("cuda"), trained("cuda")
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(parameters, again, strict=True))
    assert first[1] == pytest.approx(here[1], rel=1e-4)  # after that, orders may differ in near ties


@pytest.mark.parametrize("order", ["rr", "cd-grab"])
def test_a_captured_step_clips_and_carries(order: str, tmp_path: Path) -> None:
    _data.wikitext2(tmp_path, num=12000)

    def trained(device: str, capture: bool) -> list[float]:
        problem = wikitext2.load(tmp_path, "published", 0)
        problem.model.double()
        chosen = resolve("wikitext2", Choices(order=order, epochs=3))
        return [record.loss for record in Trainer(chosen, problem, device=device, capture=capture).run()]

    here = trained("cpu", False)
    for capture in (False, True):
        assert trained("cuda", capture) == pytest.approx(here, rel=1e-6)


@pytest.mark.parametrize("source", ["exact", "sketch:16"])
def test_resume_of_captured_steps(source: str) -> None:
    chosen = config(epochs=8, source=source)
    straight = Trainer(chosen, PROBLEMS["layers"](31), device="cuda")
    records = list(straight.run())
    first = Trainer(chosen, PROBLEMS["layers"](31), device="cuda")
    some = first.run()
    for _ in range(3):
        last = next(some)
    resumed = Trainer(chosen, PROBLEMS["layers"](31), device="cuda")
    resumed.load_state_dict(first.state_dict(), last)
    assert [r.loss for r in resumed.run()] == [r.loss for r in records[3:]]

"""The LSTM as published, trained by the program and by a loop written out: states carried, gradients clipped."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _data import make
from _streams import Line, lines_for_streams
from cdgrab import Ordering
from cdgrab_experiments.captured import CapturedSteps, Recorded
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.steps import gradients_by_unit
from cdgrab_experiments.tasks import wikitext2
from cdgrab_experiments.tasks.base import Problem
from cdgrab_experiments.train import Trainer


def chosen(order: str, **changes: Any) -> RunConfig:
    return resolve("wikitext2", Choices(order=order, epochs=2, **changes))


def problem_in(folder: Path, variant: str = "published") -> Problem:
    """With words far enough apart that gradients are longer than the limit."""
    problem = make("wikitext2", folder, variant)
    problem.model.double()
    with torch.no_grad():
        problem.model.get_parameter("embedding.weight").mul_(20.0)
    return problem


def by_hand(problem: Problem, order: str, epochs: int) -> tuple[list[Tensor], Ordering]:
    """Every worker has four columns of its own and a state of its own; every unit has a backward pass of its own."""
    x, y = problem.train[:2]
    model: Any = copy.deepcopy(problem.model)
    num = len(x) // 4
    places = Trainer(chosen(order), replace(problem, model=copy.deepcopy(model)))._places
    ordering = Ordering(len(x), batch_size=4, unit_size=1, order=order, lanes=4, seed=0)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=5.0, momentum=0.9)
    for epoch in range(epochs):
        ordering.set_epoch(epoch)
        states: list[Any] = [None] * 4
        for units in places[torch.from_numpy(ordering.remaining()).clone()].split(4):
            rows = []
            for worker, unit in enumerate(units.tolist()):
                assert unit // num == worker
                scores, state = model.go_on(x[unit], states[worker])
                states[worker] = tuple(part.detach() for part in state)
                loss = F.cross_entropy(scores.flatten(0, 1), y[unit].flatten())
                rows.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)]))
            mean = torch.stack(rows).mean(0)
            assert mean.norm() > 0.25
            mean *= 0.25 / (mean.norm() + 1e-6)
            for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
            if order != "rr":
                ordering.observe(torch.stack(rows))
            optimizer.step()
    ordering.set_epoch(epochs)
    return [parameter.detach() for parameter in parameters], ordering


@pytest.mark.parametrize("order", ["rr", "cd-grab"])
def test_training_is_that_of_a_loop_by_hand(order: str, tmp_path: Path) -> None:
    problem = problem_in(tmp_path)
    expected, ordering = by_hand(problem, order, 2)
    trainer = Trainer(chosen(order), problem)
    records = list(trainer.run())
    torch.testing.assert_close([parameter.detach() for parameter in problem.model.parameters()], expected)
    assert trainer.ordering.remaining().tolist() == ordering.remaining().tolist()
    assert records[2].loss < records[0].loss


def test_signs_come_from_gradients_that_are_not_clipped(tmp_path: Path) -> None:
    """With steps of almost nothing, a limit leaves gradients, and so orders, as they are."""
    problem = problem_in(tmp_path)
    trainers = [Trainer(chosen("cd-grab", lr=1e-12), replace(problem, clip=clip)) for clip in (None, 1e-3)]
    for trainer in trainers:
        trainer.epoch()
    assert trainers[0].ordering.remaining().tolist() == trainers[1].ordering.remaining().tolist()


def test_every_epoch_starts_with_an_empty_state(tmp_path: Path) -> None:
    problem = problem_in(tmp_path)
    model: Any = problem.model
    model.carried.fill_(math.nan)
    trainer = Trainer(chosen("rr"), problem)
    for _ in range(2):
        trainer.epoch()
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert model.carried.isfinite().all()
        model.carried.fill_(math.nan)


class Replayed:
    """Stands in for a recorded step: takes it when it is replayed."""

    def __init__(self, steps: CapturedSteps) -> None:
        self._steps = steps

    def replay(self) -> None:
        rows, recorded = self._steps._body(), self._steps._recorded
        if rows is not None and recorded is not None and recorded.rows_ND is not None:
            recorded.rows_ND.copy_(rows)


@pytest.mark.parametrize("order", ["rr", "cd-grab"])
def test_a_recorded_step_clips_and_carries(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_in(tmp_path)
    expected, by_loop = by_hand(problem, order, 2)
    places = Trainer(chosen(order), problem)._places
    ordering = Ordering(len(places), batch_size=4, unit_size=1, order=order, lanes=4, seed=0)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=5.0, momentum=0.9)
    lines_for_streams(monkeypatch)
    steps: Any = CapturedSteps(problem, ordering, optimizer, batch=4, balanced=order != "rr")
    steps._sorting = Line()
    steps._make_blocks(2, steps._flat_D)
    steps._recorded = Recorded(Replayed(steps), None if order == "rr" else torch.zeros_like(steps._blocks[0][0]))  # type: ignore[arg-type]
    for epoch in range(2):
        ordering.set_epoch(epoch)
        index = places[torch.from_numpy(ordering.remaining()).clone()]
        steps._index_SN = index.view(-1, 4)
        steps._step.zero_()
        assert problem.start_epoch is not None
        problem.start_epoch(problem.model)
        steps.epoch(index)
    ordering.set_epoch(2)
    torch.testing.assert_close([parameter.detach() for parameter in problem.model.parameters()], expected)
    assert ordering.remaining().tolist() == by_loop.remaining().tolist()


@pytest.mark.parametrize("variant", ["published", "plain"])
def test_rows_of_one_pass_are_those_of_a_pass_for_each_unit(variant: str, tmp_path: Path) -> None:
    problem = problem_in(tmp_path, variant)
    model: Any = problem.model
    nn.init.normal_(model.embedding.weight)
    dim = sum(parameter.numel() for parameter in model.parameters())
    batches = [tuple(part[index] for part in problem.train) for index in torch.arange(12).view(3, 4).T]
    for batch in batches:  # each of three groups, in every step
        found, expected = torch.full((2, 3, dim), torch.nan, dtype=torch.float64)
        flat, of_passes = torch.zeros(2, dim, dtype=torch.float64)
        before = model.carried.clone()
        gradients_by_unit(problem, batch, 3, expected, of_passes)
        after = model.carried.clone()
        model.carried.copy_(before)
        gradients_by_unit(problem, batch, 3, found, flat, at_once=True)
        torch.testing.assert_close(model.carried, after)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(flat, of_passes)
        with torch.no_grad():
            model.lstm.weight_hh_l0.mul_(1.1)  # weights change between steps


def test_variants_take_one_thing_away(tmp_path: Path) -> None:
    make("wikitext2", tmp_path)
    found = {
        name: (problem.clip, problem.start_epoch is not None, problem.shards)
        for name in wikitext2.VARIANTS
        for problem in [wikitext2.load(tmp_path, name, 0)]
    }
    assert found == {
        "published": (0.25, True, 4),
        "unclipped": (None, True, 4),
        "zero-state": (0.25, False, 4),
        "plain": (None, False, None),
    }


def test_the_loss_of_the_published_variant_is_that_of_the_text(tmp_path: Path) -> None:
    problem = make("wikitext2", tmp_path, "published")
    first = next(iter(Trainer(chosen("rr"), problem).run()))
    path = tmp_path / "wikitext-2" / "wiki.train.tokens"
    text = wikitext2.words(path.read_text())
    assert f"{len(text):,} /" in problem.data
    assert first.loss == pytest.approx(math.log(problem.model.get_parameter("embedding.weight").shape[0]), rel=0.05)
    assert set(first.metrics) == {"test_perplexity", "valid_perplexity", "test_perplexity_published"}

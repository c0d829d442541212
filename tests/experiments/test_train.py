"""The training loop: every way to take a step gives the same training, and resuming leaves no trace."""

from __future__ import annotations

import pytest
import torch

from _problems import PROBLEMS, config, layers
from cdgrab import Ordering
from cdgrab_experiments import steps
from cdgrab_experiments.repeatable import repeatable
from cdgrab_experiments.tasks.base import Problem
from cdgrab_experiments.train import Trainer


def by_hand(problem: Problem, order: str, epochs: int) -> list[float]:
    """The loop as one would write it: rows one by one, their mean to the optimizer, one step at a time."""
    ordering = Ordering(len(problem.train[0]), batch_size=6, unit_size=1, order=order, lanes=3)
    parameters = list(problem.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for epoch in range(epochs):
        losses.append(problem.loss(problem.model, *problem.train).item())
        ordering.sampler.set_epoch(epoch)
        for batch in torch.tensor(list(ordering.sampler)).split(6):
            rows = []
            for unit in batch:
                loss = problem.loss(problem.model, *(part[unit : unit + 1] for part in problem.train))
                rows.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)]))
            mean = torch.stack(rows).mean(0).split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, mean, strict=True):
                parameter.grad = part.view_as(parameter)
            if order != "rr":
                ordering.observe(torch.stack(rows))
            optimizer.step()
        scheduler.step()
    return [*losses, problem.loss(problem.model, *problem.train).item()]


@pytest.mark.parametrize("order", ["rr", "cd-grab", "pair", "id-grab", "grab"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("at_once", [1, 800, 1 << 23])  # bytes of batches: one step, a few, the whole epoch
def test_losses_are_those_of_a_loop_by_hand(
    name: str, order: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(steps._MOST_BYTES, "cpu", at_once)
    expected = by_hand(PROBLEMS[name](31), order, 3)
    found = [record.loss for record in Trainer(config(order=order), PROBLEMS[name](31)).run()]
    assert found == pytest.approx(expected, rel=1e-9)
    assert len({round(loss, 12) for loss in found}) == 4  # and something was learned


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("stop", [1, 3])
def test_resume_leaves_no_trace(name: str, stop: int) -> None:
    chosen = config(epochs=5, schedule="cosine", optimizer="adamw", lr=0.01)
    straight = list(Trainer(chosen, PROBLEMS[name](31)).run())
    first = Trainer(chosen, PROBLEMS[name](31))
    some = first.run()
    for _ in range(stop + 1):
        last = next(some)
    state = first.state_dict()
    next(some)  # what is trained meanwhile does not reach the state
    resumed = Trainer(chosen, PROBLEMS[name](31))
    resumed.load_state_dict(state, last)
    rest = list(resumed.run())
    assert [r.loss for r in rest] == [r.loss for r in straight[stop + 1 :]]
    assert [r.epoch for r in rest] == list(range(stop + 1, 6))
    assert all(a.seconds < b.seconds for a, b in zip([last, *rest], rest, strict=False))


def test_what_a_record_says() -> None:
    before, *_, last = Trainer(config(), PROBLEMS["closed"](31)).run()
    assert (before.epoch, before.seconds, before.imbalance) == (0, 0, None)
    assert last.epoch == 3
    assert last.imbalance is not None
    assert last.herding_bound is not None
    parts = last.seconds_data + last.seconds_compute + last.seconds_exchange + last.seconds_sorter
    assert parts == pytest.approx(last.seconds)
    assert min(last.seconds_data, last.seconds_compute, last.seconds_sorter) > 0


def test_sketches_train_too() -> None:
    exact = [r.loss for r in Trainer(config(), layers(31)).run()]
    whole = [r.loss for r in Trainer(config(source="sketch:131072"), layers(31)).run()]
    short = [r.loss for r in Trainer(config(source="sketch:16"), layers(31)).run()]
    assert whole == pytest.approx(exact, rel=1e-9)  # as long as the gradient: nothing is lost
    assert short != pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 40, "batch_size": 40}, "40 workers, but only 31 examples"),
        ({"order": "global-rr", "partition": "sorted"}, "deals anew every epoch"),
        ({"schedule": "step:2"}, "schedule 'step:2' cannot be read"),
        ({"schedule": "wild"}, "unknown schedule 'wild'"),
        ({"schedule": "step:0:0.5"}, "N must be at least 1"),
        ({"schedule": "step:1:nan"}, "F above 0"),
        ({"source": "sketch:16"}, "makes short rows of single examples"),
    ],
)
def test_what_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(config(**changes), PROBLEMS["closed"](31))


def test_what_makes_a_gpu_repeatable_is_undone() -> None:
    """Flags can be set without a GPU."""

    def flags() -> list[bool]:
        cudnn = torch.backends.cudnn
        strict = torch.are_deterministic_algorithms_enabled()
        return [strict, cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory]  # type: ignore[attr-defined]

    before = flags()
    with repeatable(torch.device("cuda")):
        assert flags() == [True, True, False, False]
    assert flags() == before
    with pytest.raises(KeyError), repeatable(torch.device("cuda")):
        raise KeyError
    assert flags() == before
    with repeatable(torch.device("cpu")):
        assert flags() == before

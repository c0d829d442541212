"""A run goes on with another number of ranks: same examples in the same steps, if the global batch is the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _inputs import randn
from cdgrab import Ordering
from distributed._ranks import run_ranks

LENGTH, BATCH = 44, 8  # of all ranks together; nobody repeats an example to fill the last step
X, Y = randn(LENGTH, 6, dtype=torch.float64), randn(LENGTH, 2, seed=1, dtype=torch.float64)

VARIANTS: dict[str, dict[str, Any]] = {
    "observe": {"exchange": "gather"},
    "observe, sharded": {},
    "observe, server": {"exchange": "server"},
    "named": {"named": True, "exchange": "gather"},
    "per_example": {"source": "per_example"},
    "sketch": {"source": "sketch"},
    "walk": {"rule": "walk"},
    "pair": {"order": "pair", "rule": "halving"},
    "grab": {"order": "grab"},
    "id-grab": {"order": "id-grab"},
    "rr": {"order": "rr"},
}


class Run:
    def __init__(self, batch: int = BATCH, source: str | None = None, named: bool = False, **options: Any) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        self.ordering = Ordering(LENGTH, batch_size=batch // size, **{"unit_size": 1, **options})
        self.named, self.source = named, source
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.model: nn.Module = DistributedDataParallel(net) if source and size > 1 else net
        if source:
            self.ordering.attach(self.model, source=source)

    def steps(self, count: int) -> list[list[int]]:
        seen = []
        for _ in range(count):
            batch = torch.from_numpy(self.ordering.remaining()[: self.ordering.batch_size])
            seen.append(batch.tolist())
            if self.source:
                self.model.zero_grad()
                (self.model(X[batch]) - Y[batch]).square().sum(1).mean().backward()
            else:
                rows = torch.stack([unit.mean(0) for unit in X[batch].split(self.ordering.unit_size)])
                self.ordering.observe(rows, batch if self.named else None)
        return seen


def went_on(variant: str, state: Any, steps: int) -> tuple[list[list[int]], Any]:
    """The batches of some steps after a state, or from the start, and the state that is left."""
    run = Run(**VARIANTS[variant])
    if state is not None:
        run.ordering.load_state_dict(state)
    seen = run.steps(steps)
    state = run.ordering.state_dict()
    if run.source:
        run.ordering.detach()
    return seen, state


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def on_ranks(size: int, function: Any, *arguments: Any) -> list[Any]:
    return run_ranks(size, function, *arguments) if size > 1 else [function(*arguments)]


def in_step(answers: list[Any]) -> list[list[int]]:
    """The examples of each step, of all ranks together."""
    return [sorted(joined(batches)) for batches in zip(*(seen for seen, _ in answers), strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stops", [(6, 6), (9, 5)], ids=["between epochs", "within epochs"])
def test_the_same_examples_come_in_the_same_steps(variant: str, stops: tuple[int, int]) -> None:
    expected = in_step(on_ranks(4, went_on, variant, None, 20))
    for sizes in ((4, 2, 4), (4, 1, 2)):
        state, found = None, []
        for size, steps in zip(sizes, (*stops, 20 - sum(stops)), strict=True):
            answers = on_ranks(size, went_on, variant, state, steps)
            states = [state["payload"] for _, state in answers]
            assert states == states[:1] * size  # rank 0's will do
            state = answers[0][1]
            found += in_step(answers)
        assert found == expected


def left_and_next(batch: int, options: dict[str, Any], state: Any) -> list[list[int]]:
    """What is visited of an epoch, and of the two after it."""
    run = Run(batch, **options)
    run.ordering.load_state_dict(state)
    epoch, found = run.ordering.epoch, []
    for number in range(3):
        seen: list[int] = []
        while run.ordering.epoch == epoch + number:
            seen += joined(run.steps(1))
        found.append(seen)
    return found


def began(batch: int, options: dict[str, Any], steps: int) -> tuple[list[list[int]], Any]:
    run = Run(batch, **options)
    return run.steps(steps), run.ordering.state_dict()


@pytest.mark.parametrize("steps", [2, 3, 9])
@pytest.mark.parametrize(
    "options",
    [{}, {"exchange": "gather"}, {"order": "pair"}, {"order": "grab"}, {"order": "id-grab"}, {"order": "rr"}],
    ids=str,
)
def test_another_global_batch_is_dealt_anew(options: dict[str, Any], steps: int) -> None:
    """Four ranks with 8 examples in all, then 2 with 12 and one with 5."""
    answers = run_ranks(4, began, 8, options, steps)
    last = steps % 6
    visited = {example for seen, _ in answers for batch in seen[len(seen) - last :] for example in batch}
    for size, batch in ((2, 12), (1, 5)):
        epochs = list(zip(*on_ranks(size, left_and_next, batch, options, answers[0][1]), strict=True))
        left = joined(epochs[0])
        assert set(left) == set(range(LENGTH)) - visited
        assert len(left) - len(set(left)) < size
        for seen in epochs[1:]:
            assert set(joined(seen)) == set(range(LENGTH))
            assert len(joined(seen)) < LENGTH + size


def part_of_a_job(state: Any, steps: int) -> tuple[list[list[int]], Any]:
    run = Run(24, source="sketch")
    if state is not None:
        run.ordering.load_state_dict(state)
    seen = run.steps(steps)
    state = run.ordering.state_dict()
    run.ordering.detach()
    return seen, state


def test_one_job_moves_from_4_ranks_to_2_and_on_to_3() -> None:
    """Two steps are an epoch. Both moves are in the middle of one."""
    state, found = None, []
    for size, steps in ((4, 3), (2, 2), (3, 3)):
        answers = run_ranks(size, part_of_a_job, state, steps)
        state = answers[0][1]
        found += in_step(answers)
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert len(first) == 24
        assert set(first) | set(second) == set(range(LENGTH))
        assert len(second) - 20 <= 1  # three ranks repeat one example


def through_a_checkpoint(folder: str, save: bool) -> tuple[list[list[int]], Any]:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    run = Run()
    seen = run.steps(9) if save else []
    states = {"ordering": run.ordering.state_dict()}
    if save:
        state_dict_saver.save(states, checkpoint_id=folder)
        return run.steps(5), None
    state_dict_loader.load(states, checkpoint_id=folder)
    run.ordering.load_state_dict(states["ordering"])
    return seen + run.steps(5), None


def test_distributed_checkpoints_fit_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = in_step(run_ranks(4, through_a_checkpoint, str(tmp_path), True))
    for size in (4, 2):
        assert in_step(run_ranks(size, through_a_checkpoint, str(tmp_path), False)) == expected

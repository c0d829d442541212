"""Ways to take a training step: the gradient of a batch goes to the optimizer, the rows of its units to the ordering.

Here a step is ordinary eager code; on a GPU it is recorded (`captured.py`). Rows of several steps are collected and
observed together: signs are not due before the end of the epoch.

Shapes: `N` units in a batch, `D` parameters, `K` steps that are collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdgrab import Ordering
from cdgrab_experiments.tasks.base import LateRows, Problem

# How many steps' rows are collected at most, and how many bytes of rows; on a GPU there are two such blocks. What is
# fetched at once is bounded by those of the CPU.
_MOST_STEPS = {"cpu": 512, "cuda": 64}
_MOST_BYTES = {"cpu": 1 << 25, "cuda": 1 << 32}
_MOST_LATE_BYTES = 1 << 22  # of rows that are made at once, and should still be in cache when they are observed

Batch = tuple[Tensor, ...]


class Steps(Protocol):
    """Takes the steps of an epoch."""

    seconds_exchange: float

    @property
    def seconds_sorter(self) -> float | None:
        """Of the last epoch; None if what the ordering itself has counted is right."""

    def prepare(self, index_M: Tensor) -> None:
        """Do beforehand what is done once, such as compiling; not timed. `index_M` is what the epoch will train on."""

    def forget(self) -> None:
        """Parameters and states have been replaced: nothing that was recorded with others holds."""

    def epoch(self, index_M: Tensor) -> float:
        """Train on the units `index_M`, batch by batch. Returns the seconds spent on fetching them."""


class Collector:
    """Rows of several steps, handed to the ordering together.

    Args:
        ordering: Observes them.
        batch: Units in a step; the last one of an epoch may have fewer.
        steps: As many as are collected at most.
        like_D: A row.
    """

    def __init__(self, ordering: Ordering, batch: int, steps: int, like_D: Tensor) -> None:
        self._ordering, self._batch, self._steps, self._like_D = ordering, batch, steps, like_D
        self._rows_KND = torch.empty(0)
        self._places: tuple[Tensor, ...] = ()  # one for each step: small models would notice their making
        self._waiting = 0
        self._short_1ND: Tensor | None = None

    def place(self, num: int) -> Tensor:
        """Where the rows of the next step are to be written, `num x dim`, before the next call."""
        if self._waiting == len(self._places) or num != self._batch or self._short_1ND is not None:
            self.flush()
        if num != self._batch:
            self._short_1ND = self._like_D.new_empty(1, num, len(self._like_D))
            return self._short_1ND[0]
        if not self._places:
            self._rows_KND = self._like_D.new_empty(self._steps, num, len(self._like_D))
            self._places = self._rows_KND.unbind()
        self._waiting += 1
        return self._places[self._waiting - 1]

    def forget(self) -> None:
        """Nothing waits: an epoch begins, perhaps after one that was broken off."""
        self._waiting, self._short_1ND = 0, None

    def flush(self) -> None:
        """Hand over what waits."""
        waiting, self._waiting = self._waiting, 0
        short, self._short_1ND = self._short_1ND, None
        if waiting:
            self._ordering.observe(self._rows_KND[:waiting])
        if short is not None:
            self._ordering.observe(short)


class LateCollector:
    """What several steps have kept, made into rows and handed to the ordering together.

    Args:
        ordering: Observes them.
        late: Makes them.
        batch: Units in a step; the last one of an epoch may have fewer.
        steps: As many as are collected at most.
        like_D: A row.
    """

    def __init__(self, ordering: Ordering, late: LateRows, batch: int, steps: int, like_D: Tensor) -> None:
        self._ordering, self._late, self._batch, self._like_D = ordering, late, batch, like_D
        self._kept = self._room(steps, batch)
        self._places = list(zip(*(part.unbind() for part in self._kept), strict=True))
        self._waiting = 0
        self._short: Batch | None = None

    def places(self, num: int) -> Batch:
        """Where the next step, of `num` units, is to write what it keeps."""
        if num != self._batch:
            self._short = self._room(1, num)
            return tuple(part[0] for part in self._short)
        self._waiting += 1
        return self._places[self._waiting - 1]

    def forget(self) -> None:
        """As that of `Collector`."""
        self._waiting, self._short = 0, None

    def flush(self, parts_m: Batch) -> None:
        """Hand over what has been kept; `parts_m` are the batches of these steps, one after the other."""
        waiting, self._waiting = self._waiting, 0
        short, self._short = self._short, None
        units = waiting * self._batch
        if waiting:
            self._observe(tuple(part[:waiting] for part in self._kept), tuple(part[:units] for part in parts_m))
        if short is not None:
            self._observe(short, tuple(part[units:] for part in parts_m))

    def _observe(self, kept: Batch, parts_m: Batch) -> None:
        """Steps with equally many units."""
        batches = (part.unflatten(0, (len(kept[0]), -1)) for part in parts_m)
        self._ordering.observe(self._late.rows(kept, *batches))

    def _room(self, steps: int, units: int) -> Batch:
        return tuple(self._like_D.new_empty(steps, *size) for size in self._late.sizes(units))


def block_steps(num: int, like_D: Tensor) -> int:
    """How many steps of `num` rows are collected."""
    kind = like_D.device.type
    most = _MOST_BYTES[kind] // max(1, num * like_D.nbytes)
    return max(2, min(_MOST_STEPS[kind], most) // 2 * 2)


class EagerSteps:
    """Step by step.

    Args:
        problem: What is trained.
        model: Its model, or that model wrapped for several ranks.
        ordering: Observes rows; attached already where gradients come from a backward pass.
        optimizer: Takes the steps.
        batch: Units of this process in a step.
        balanced: Whether the order asks for rows.
        ranks: Number of ranks among which closed-form gradients are averaged.
    """

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        ordering: Ordering,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int,
        balanced: bool,
        ranks: int,
    ) -> None:
        self._problem, self._model, self._optimizer = problem, model, optimizer
        self._batch, self._balanced, self._ranks = batch, balanced, ranks
        self._parameters = [p for p in problem.model.parameters() if p.requires_grad]
        self.seconds_exchange = 0.0
        in_parts = balanced and ranks == 1 and problem.examples > 1
        self._gradient: Callable[[Batch], None] = self._by_backward
        if problem.gradient is not None:
            self._gradient = self._in_closed_form
        elif in_parts:
            self._gradient = self._by_unit
        # Batches of several steps are fetched at once.
        of_step = batch * sum(part[:1].nbytes for part in problem.train)
        self._fetched = max(1, min(_MOST_STEPS["cpu"], _MOST_BYTES["cpu"] // of_step))
        self._late = problem.late if balanced else None
        self._compiles = balanced and problem.gradient is not None  # a closed form may, at its first rows (M4)
        if self._gradient != self._by_backward:
            self._flat_D = flat_gradients(self._parameters)
            steps = block_steps(batch * ranks, self._flat_D)  # ranks may send each other all they have
            self._collector = Collector(ordering, batch, steps, self._flat_D)
        if self._late is not None:
            late = max(2, _MOST_LATE_BYTES // (batch * self._flat_D.nbytes))
            self._fetched = min(self._fetched, steps, late)  # their rows are made together
            self._late_collector = LateCollector(ordering, self._late, batch, self._fetched, self._flat_D)

    @property
    def seconds_sorter(self) -> None:
        return None

    def prepare(self, index_M: Tensor) -> None:
        if self._compiles:
            self._problem.rows(*(part.index_select(0, index_M[:1]) for part in self._problem.train))
            self._compiles = False

    def forget(self) -> None:
        pass

    def epoch(self, index_M: Tensor) -> float:
        self.seconds_exchange, fetching = 0.0, 0.0
        if self._gradient != self._by_backward:
            self._collector.forget()
        if self._late is not None:
            self._late_collector.forget()
        for index_m in index_M.split(self._fetched * self._batch):
            start = time.perf_counter()
            parts_m = tuple(part.index_select(0, index_m) for part in self._problem.train)
            fetching += time.perf_counter() - start
            for batch in zip(*(part.split(self._batch) for part in parts_m), strict=True):
                self._gradient(batch)
                take_step(self._problem, self._optimizer)
            if self._late is not None:
                self._late_collector.flush(parts_m)
        if self._late is None and self._gradient != self._by_backward:
            self._collector.flush()
        return fetching

    def _by_backward(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        self._problem.loss(self._model, *batch).backward()

    def _in_closed_form(self, batch: Batch) -> None:
        assert self._problem.gradient is not None
        if self._late is not None:
            places = self._late_collector.places(len(batch[0]))
            self._flat_D.copy_(self._late.gradient(self._problem.model, *batch, kept=places))
        else:
            place_ND = self._collector.place(len(batch[0])) if self._balanced else None
            self._flat_D.copy_(self._problem.gradient(self._problem.model, *batch, rows=place_ND))
        if self._ranks > 1:
            start = time.perf_counter()
            dist.all_reduce(self._flat_D)
            self._flat_D.div_(self._ranks)
            self.seconds_exchange += time.perf_counter() - start

    def _by_unit(self, batch: Batch) -> None:
        gradients_by_unit(self._problem, batch, self._batch, self._collector.place(len(batch[0])), self._flat_D)


def take_step(problem: Problem, optimizer: torch.optim.Optimizer) -> None:
    """Step along the gradient that the parameters hold, clipped if the problem has a limit. Nothing waits for a GPU."""
    if problem.clip is not None:
        nn.utils.clip_grad_norm_(problem.model.parameters(), problem.clip)
    optimizer.step()


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of which the gradients of all parameters are views."""
    flat_D = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, flat_D.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat_D


def gradients_by_unit(
    problem: Problem, batch: Batch, whole: int, rows_ND: Tensor, flat_D: Tensor, *, at_once: bool = False
) -> None:
    """Write every unit's gradient, over the units of a `whole` batch, into `rows_ND`, and the batch's into `flat_D`.

    One backward pass for each unit: a unit is several examples, which a pass over the batch would not put together.
    With `at_once`, one pass for all of them if the problem knows how.
    """
    if at_once and problem.unit_rows is not None:
        problem.unit_rows(problem.model, *batch, rows=rows_ND)
        rows_ND.div_(whole)
    else:
        parameters = [p for p in problem.model.parameters() if p.requires_grad]
        for unit, row_D in zip(zip(*(part.split(1) for part in batch), strict=True), rows_ND, strict=True):
            grads = torch.autograd.grad(problem.loss(problem.model, *unit) / whole, parameters)
            torch.cat([grad.flatten() for grad in grads], out=row_D)
    torch.mul(rows_ND.sum(0), whole / len(rows_ND), out=flat_D)  # the mean over fewer units weighs each of them more

"""Ways to take a training step: the gradient of a batch goes to the optimizer, the rows of its units to the ordering.

On the CPU a step is ordinary eager code. On a GPU most steps of these small models would be spent on launching kernels,
so a whole step is captured once as a CUDA graph and replayed. Rows of several steps are collected and observed
together: signs are not due before the end of the epoch.

Shapes: `N` units in a batch, `D` parameters, `K` steps that are collected, `S` steps of an epoch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdgrab import Ordering
from cdgrab.ghost.layers import widened
from cdgrab.ghost.records import Record
from cdgrab.hooks.rows import ExampleRows
from cdgrab.paper.tasks.base import Problem

_MOST_STEPS = 64
_MOST_BYTES = {"cpu": 1 << 22, "cuda": 1 << 33}  # of rows that are collected

Batch = tuple[Tensor, ...]


class Steps(Protocol):
    """Takes the steps of an epoch."""

    seconds_exchange: float
    seconds_fitting: float  # of `prepare`: what belongs to an order and not to the machinery

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
        like_D: A row.
    """

    def __init__(self, ordering: Ordering, batch: int, like_D: Tensor) -> None:
        self._ordering, self._batch, self._like_D = ordering, batch, like_D
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
            self._rows_KND = self._like_D.new_empty(block_steps(num, self._like_D), num, len(self._like_D))
            self._places = self._rows_KND.unbind()
        self._waiting += 1
        return self._places[self._waiting - 1]

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
        rows: Makes them.
        like_D: A row.
    """

    def __init__(self, ordering: Ordering, rows: Callable[..., Tensor], like_D: Tensor) -> None:
        self._ordering, self._rows, self._like_D = ordering, rows, like_D
        self._num, self._most = 0, 0  # units in a step, and steps that are collected
        self._kept: list[Batch] = []
        self._batches: list[Batch] = []

    def keep(self, kept: Batch, batch: Batch) -> None:
        """Take the next step."""
        num = len(batch[0])
        if num != self._num:  # the last batch of an epoch may be short
            self.flush()
            self._num, self._most = num, block_steps(num, self._like_D)
        self._kept.append(kept)
        self._batches.append(batch)
        if len(self._kept) == self._most:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        kept, batches = self._kept, self._batches
        self._kept, self._batches = [], []
        if kept:
            steps = tuple(torch.stack(parts) for parts in zip(*kept, strict=True))
            self._ordering.observe(self._rows(steps, *(torch.stack(parts) for parts in zip(*batches, strict=True))))


def block_steps(num: int, like_D: Tensor) -> int:
    """How many steps of `num` rows are collected."""
    most = _MOST_BYTES[like_D.device.type] // max(1, num * like_D.nbytes)
    return max(2, min(_MOST_STEPS, most) // 2 * 2)


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
        self.seconds_exchange = self.seconds_fitting = 0.0
        one_by_one = balanced and ranks == 1 and not problem.single_examples
        self._gradient: Callable[[Batch], None] = self._by_backward
        if problem.gradient is not None:
            self._gradient = self._in_closed_form
        elif one_by_one:
            self._gradient = self._unit_by_unit
        self._late = problem.late if balanced else None
        if self._gradient != self._by_backward:
            self._flat_D = flat_gradients(self._parameters)
            self._collector = Collector(ordering, batch, self._flat_D)
        if self._late is not None:
            self._late_collector = LateCollector(ordering, self._late.rows, self._flat_D)

    @property
    def seconds_sorter(self) -> None:
        return None

    def prepare(self, index_M: Tensor) -> None:
        pass

    def forget(self) -> None:
        pass

    def epoch(self, index_M: Tensor) -> float:
        self.seconds_exchange, fetching = 0.0, 0.0
        for index_N in index_M.split(self._batch):
            start = time.perf_counter()
            batch = tuple(part.index_select(0, index_N) for part in self._problem.train)
            fetching += time.perf_counter() - start
            self._gradient(batch)
            self._optimizer.step()
        if self._late is not None:
            self._late_collector.flush()
        elif self._gradient != self._by_backward:
            self._collector.flush()
        return fetching

    def _by_backward(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        self._problem.loss(self._model, *batch).backward()

    def _in_closed_form(self, batch: Batch) -> None:
        assert self._problem.gradient is not None
        if self._late is not None:
            found_D, kept = self._late.gradient(self._problem.model, *batch)
            self._flat_D.copy_(found_D)
            self._late_collector.keep(kept, batch)
        else:
            place_ND = self._collector.place(len(batch[0])) if self._balanced else None
            self._flat_D.copy_(self._problem.gradient(self._problem.model, *batch, rows=place_ND))
        if self._ranks > 1:
            start = time.perf_counter()
            dist.all_reduce(self._flat_D)
            self._flat_D.div_(self._ranks)
            self.seconds_exchange += time.perf_counter() - start

    def _unit_by_unit(self, batch: Batch) -> None:
        rows_ND = unit_rows(self._problem, self._parameters, batch, self._collector.place(len(batch[0])))
        torch.mean(rows_ND, 0, out=self._flat_D)


class CapturedSteps:
    """The steps of one process on a GPU, each a replay of the same graph.

    A short last batch, and everything before the first capture, runs eagerly through the same code. A model that the
    ordering is attached to gives sketches, which are taken from the attachment and observed later.
    """

    def __init__(
        self,
        problem: Problem,
        ordering: Ordering,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int,
        balanced: bool,
    ) -> None:
        self._problem, self._ordering, self._optimizer = problem, ordering, optimizer
        self._batch, self._balanced = batch, balanced
        self._parameters = [p for p in problem.model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._flat_D = flat_gradients(self._parameters)
        self._attachment = cast("Any", ordering._attachment)  # makes sketches, if they are wanted
        self._sketch_ND: Tensor | None = None  # of the last batch
        if self._attachment is not None:
            self._attachment.consume = self._take_sketch
        elif balanced and problem.gradient is None and problem.single_examples:
            self._example_rows = ExampleRows(problem.model)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_at: list[float] = []
        self._index_SN = torch.zeros(0, batch, dtype=torch.int64, device=self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._rows_ND: Tensor | None = None  # where the graph leaves those of its step
        self._rows_KND = torch.zeros(0, 0, 0)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds_exchange = self.seconds_fitting = 0.0

    @property
    def seconds_sorter(self) -> float:
        """On the device, in the last epoch."""
        torch.cuda.synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3

    def epoch(self, index_M: Tensor) -> float:
        self._events = []
        steps = len(index_M) // self._batch
        waiting = 0
        for _ in range(steps):
            assert self._graph is not None
            self._graph.replay()
            if self._rows_ND is not None:
                self._rows_KND[waiting].copy_(self._rows_ND)
                waiting += 1
                if waiting == len(self._rows_KND):
                    self._observe(self._rows_KND)
                    waiting = 0
        if waiting:
            self._observe(self._rows_KND[:waiting])
        rest_n = index_M[steps * self._batch :]
        if len(rest_n):
            rows_ND = self._gradient(tuple(part.index_select(0, rest_n) for part in self._problem.train))
            self._optimizer.step()
            if rows_ND is not None:
                self._observe(rows_ND[None])
        return 0.0

    def _observe(self, rows_KND: Tensor) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._ordering._observe(rows_KND)  # also of a model that the ordering is attached to
        end.record()
        self._events.append((start, end))

    def prepare(self, index_M: Tensor) -> None:
        """Lay the epoch's indices out, and capture the step if that has not been done with these step sizes."""
        steps = len(index_M) // self._batch
        whole_SN = index_M[: steps * self._batch].view(steps, self._batch)
        if self._index_SN.shape != whole_SN.shape:
            self._index_SN, self._graph = whole_SN.clone(), None
        self._index_SN.copy_(whole_SN)
        self._step.zero_()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if self._attachment is not None:
            torch.cuda.synchronize()
            start = time.perf_counter()
            if self._attachment.sketcher.begin(self._ordering.epoch, widened(self._flat_D)):
                self._graph = None
            torch.cuda.synchronize()
            self.seconds_fitting = time.perf_counter() - start
        if steps and (self._graph is None or rates != self._captured_at):
            self._capture()
            if self._balanced and not self._captured_at:
                self._rehearse(steps, len(index_M) % self._batch)
            self._captured_at = rates

    def forget(self) -> None:
        self._graph = None

    def _rehearse(self, steps: int, rest: int) -> None:
        """An epoch of another ordering on rows of zeros, so that all its kernels are compiled before the clock runs."""
        ordering = self._ordering
        other = Ordering(
            len(self._problem.train[0]),
            batch_size=ordering.batch_size,
            unit_size=1,
            order=ordering.order_name,
            rule=ordering._make_rule,
            world=ordering.world,
        )
        self._rows_KND.zero_()
        for start in range(0, steps, len(self._rows_KND)):
            other.observe(self._rows_KND[: steps - start])
        if rest:
            other.observe(self._rows_KND[0, :rest])
        other.set_epoch(1)

    def _capture(self) -> None:
        """Run a few steps to warm up, undo them, then record one."""
        parameters = [p.detach().clone() for p in self._parameters]
        state = copy.deepcopy(self._optimizer.state_dict())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step.zero_()  # an epoch may be shorter than three steps
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        self._restore(parameters, state)
        self._step.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._rows_ND = self._body()
        if self._rows_ND is not None and self._rows_KND.shape[1:] != self._rows_ND.shape:
            steps = block_steps(len(self._rows_ND), self._rows_ND[0])
            self._rows_KND = self._rows_ND.new_zeros(steps, *self._rows_ND.shape)
        # Recording changes nothing, but for what the optimizer noted on the host.
        self._restore(parameters, state)
        if self._attachment is not None:
            self._attachment.sketcher.forget()
        self._step.zero_()

    def _restore(self, parameters: list[Tensor], state: dict[str, Any]) -> None:
        """Put values back where the graph reads them."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, parameters, strict=True):
                parameter.copy_(value)
        before = state["state"]
        for number, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if number in before and before[number].get(key) is not None:
                    value.copy_(before[number][key])
                else:
                    value.zero_()  # momentum and the like begin at zero

    def _body(self) -> Tensor | None:
        index_N = self._index_SN.index_select(0, self._step)[0]
        rows_ND = self._gradient(tuple(part.index_select(0, index_N) for part in self._problem.train))
        self._optimizer.step()
        self._step.add_(1)
        return rows_ND

    def _gradient(self, batch: Batch) -> Tensor | None:
        """Leave the batch's gradient in the parameters; rows of its units, if they are wanted."""
        problem, num = self._problem, len(batch[0])
        if problem.gradient is not None:
            place_ND = self._flat_D.new_empty(num, len(self._flat_D)) if self._balanced else None
            self._flat_D.copy_(problem.gradient(problem.model, *batch, rows=place_ND))
            return place_ND
        if not self._balanced or self._attachment is not None:
            self._flat_D.zero_()
            problem.loss(problem.model, *batch).backward()
            return self._sketch_ND
        if problem.single_examples:
            rows_ND = self._example_rows(lambda: problem.loss(problem.model, *batch), num)
            torch.sum(rows_ND, 0, out=self._flat_D)
            # The mean over fewer examples gives each of them more weight.
            return rows_ND if num == self._batch else rows_ND * (num / self._batch)
        rows_ND = unit_rows(problem, self._parameters, batch, self._flat_D.new_empty(num, len(self._flat_D)))
        torch.mean(rows_ND, 0, out=self._flat_D)
        return rows_ND

    def _take_sketch(self, records: dict[str, Record], shapes: dict[str, torch.Size]) -> None:  # noqa: ARG002
        self._sketch_ND = self._attachment.sketcher(records, self._ordering.epoch)


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of which the gradients of all parameters are views."""
    flat_D = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, flat_D.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat_D


def unit_rows(problem: Problem, parameters: list[nn.Parameter], batch: Batch, place_ND: Tensor) -> Tensor:
    """Gradients of units, by a backward pass each, in `place_ND`."""
    for row_D, *unit in zip(place_ND, *(part.split(1) for part in batch), strict=True):
        grads = torch.autograd.grad(problem.loss(problem.model, *unit), parameters)
        torch.cat([grad.flatten() for grad in grads], out=row_D)
    return place_ND

"""Training steps on a GPU, each the replay of a recording.

Most of a step of these small models would be spent on launching kernels, so a whole step is captured as a CUDA graph.

Shapes: `N` units in a batch, `D` parameters, `K` steps that are collected, `S` steps of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdgrab import Ordering
from cdgrab.sources import Attachment, GradientSource, Port
from cdgrab_experiments.steps import Batch, block_steps, flat_gradients, gradients_by_unit, take_step
from cdgrab_experiments.tasks.base import Problem


class Recorded(NamedTuple):
    """A step, and where it leaves the rows of its units."""

    graph: torch.cuda.CUDAGraph
    rows_ND: Tensor | None


class HeldRows:
    """A source whose rows are not observed at once, but left for whoever captures the step.

    Args:
        source: Finds the rows.

    Attributes:
        rows_ND: Of the last batch.
        port: Takes them, when it is time.
    """

    port: Port

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self.rows_ND: Tensor | None = None

    def attach(self, port: Port, model: nn.Module) -> Attachment:
        """As the source would."""
        self.port = port
        stand_in: Any = _Holding(port, self)
        return self._source.attach(stand_in, model)


class _Holding:
    """The port of an ordering, but for the rows."""

    def __init__(self, port: Port, held: HeldRows) -> None:
        self._port, self._held = port, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def observe(self, rows_ND: Tensor) -> None:
        self._held.rows_ND = rows_ND


class CapturedSteps:
    """The steps of one process on a GPU, replayed.

    A short last batch, and everything before the first capture, runs eagerly through the same code. A model that the
    ordering is attached to leaves rows or sketches in `held`. Rows of several steps are copied into one block.

    The ordering observes rows beside training, on a stream of its own: it reads memory most of the time, while steps
    compute. So there are two blocks of rows, one that is written and one that is observed.
    """

    def __init__(
        self,
        problem: Problem,
        ordering: Ordering,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int,
        balanced: bool,
        rule: str = "greedy",
        held: HeldRows | None = None,
    ) -> None:
        self._problem, self._ordering, self._optimizer = problem, ordering, optimizer
        self._batch, self._balanced, self._rule = batch, balanced, rule
        self._held = held
        self._observe_rows = ordering.observe if held is None else held.port.observe
        self._parameters = [p for p in problem.model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._flat_D = flat_gradients(self._parameters)
        self._by_backward = problem.gradient is None and (held is not None or not balanced)
        self._recorded: Recorded | None = None
        self._captured_at: list[float] = []
        self._index_SN = torch.zeros(0, batch, dtype=torch.int64, device=self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._blocks: list[Tensor] = []  # each `K x N x D`
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._device.type == "cuda":
            # Steps come first where both want to run.
            self._capturing = torch.cuda.Stream(self._device, priority=-1)
            self._sorting = torch.cuda.Stream(self._device)
        self.seconds_exchange = 0.0

    @property
    def seconds_sorter(self) -> float:
        """What training waited for it in the last epoch; the rest of it was beside."""
        torch.cuda.synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3

    def epoch(self, index_M: Tensor) -> float:
        self._events = []
        steps = len(index_M) // self._batch
        observed: list[torch.cuda.Event] = []  # ends of the blocks so far
        waiting = 0
        for _ in range(steps):
            if waiting == 0 and len(observed) > 1:
                self._wait_for(observed[-2])  # this block's rows have been read
            assert self._recorded is not None
            self._recorded.graph.replay()
            if self._recorded.rows_ND is None:
                continue
            block_KND = self._blocks[len(observed) % 2]
            block_KND[waiting].copy_(self._recorded.rows_ND)
            waiting += 1
            if waiting == len(block_KND):
                observed.append(self._observe(block_KND))
                waiting = 0
        if waiting:
            observed.append(self._observe(self._blocks[len(observed) % 2][:waiting]))
        rest_n = index_M[steps * self._batch :]
        if len(rest_n):
            rows_ND = self._gradient(tuple(part.index_select(0, rest_n) for part in self._problem.train))
            take_step(self._problem, self._optimizer)
            if rows_ND is not None:
                observed.append(self._observe(rows_ND[None]))
        if observed:
            self._wait_for(observed[-1])
        return 0.0

    def _observe(self, rows_KND: Tensor) -> torch.cuda.Event:
        """Let the ordering see rows; gives the end of that."""
        end = torch.cuda.Event()
        self._sorting.wait_stream(torch.cuda.current_stream())
        # Timed here too: some orders and rules, and the end of an epoch, make the host wait.
        with self._timed(), torch.cuda.stream(self._sorting):
            self._observe_rows(rows_KND)
            end.record()
        return end

    def _wait_for(self, end: torch.cuda.Event) -> None:
        with self._timed():
            torch.cuda.current_stream().wait_event(end)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count how long the stream of the steps has nothing to do."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._events.append((before, after))

    def prepare(self, index_M: Tensor) -> None:
        """Lay the epoch's indices out, and capture the step if that has not been done with these step sizes."""
        steps = len(index_M) // self._batch
        whole_SN = index_M[: steps * self._batch].view(steps, self._batch)
        if self._index_SN.shape != whole_SN.shape:
            self._index_SN = whole_SN.clone()
            self.forget()
        self._index_SN.copy_(whole_SN)
        self._step.zero_()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if steps and (self._recorded is None or rates != self._captured_at):
            self._capture()
            if self._balanced and not self._captured_at:
                self._rehearse(steps, len(index_M) % self._batch)
            self._captured_at = rates

    def forget(self) -> None:
        self._recorded = None

    def _rehearse(self, steps: int, rest: int) -> None:
        """An epoch of another ordering on made-up rows, so that all its kernels are compiled before the clock runs."""
        ordering = self._ordering
        other = Ordering(
            len(self._problem.train[0]),
            batch_size=ordering.batch_size,
            unit_size=1,
            order=ordering.order_name,
            rule=self._rule,
            lanes=ordering.lanes,
        )
        block_KND = self._blocks[0].zero_()
        block_KND[1::2] = 1.0  # an epoch in which all differences are zero gets a warning
        self._sorting.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._sorting):
            for start in range(0, steps, len(block_KND)):
                other.observe(block_KND[: steps - start])
            if rest:
                other.observe(block_KND[0, :rest])
            other.set_epoch(1)
        torch.cuda.current_stream().wait_stream(self._sorting)

    def _capture(self) -> None:
        """Run a few steps to warm up, undo them, then record one."""
        self.forget()
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._capturing):
            rows_ND = self._body()
        self._recorded = Recorded(graph, rows_ND)
        if rows_ND is not None and (not self._blocks or self._blocks[0].shape[1:] != rows_ND.shape):
            self._make_blocks(block_steps(len(rows_ND), rows_ND[0]), rows_ND[0])
        # Recording changes nothing, but for what the optimizer noted on the host.
        self._restore(parameters, state)
        self._step.zero_()

    def _make_blocks(self, steps: int, like_D: Tensor) -> None:
        self._blocks = [like_D.new_zeros(steps, self._batch, len(like_D)) for _ in range(2)]

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
        take_step(self._problem, self._optimizer)
        self._step.add_(1)
        return rows_ND

    def _gradient(self, batch: Batch) -> Tensor | None:
        """Leave the batch's gradient in the parameters; returns rows of its units if the order asks for them."""
        problem = self._problem
        if self._by_backward:
            self._flat_D.zero_()
            problem.loss(problem.model, *batch).backward()
            return None if self._held is None else self._held.rows_ND
        rows_ND = self._flat_D.new_empty(len(batch[0]), len(self._flat_D)) if self._balanced else None
        if problem.gradient is not None:
            self._flat_D.copy_(problem.gradient(problem.model, *batch, rows=rows_ND))
        elif rows_ND is not None:
            gradients_by_unit(problem, batch, self._batch, rows_ND, self._flat_D, at_once=True)
        return rows_ND

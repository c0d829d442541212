"""One training loop for all tasks and orders: simulated workers in one process, or real ranks; CPU or GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from cdgrab import ORDERS, Ordering, herding_bound
from cdgrab.sources import BatchSource, GradientSource, PerExampleSource, SketchSource
from cdgrab_experiments.captured import CapturedSteps, HeldRows
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.records import EpochRecord
from cdgrab_experiments.repeatable import repeatable
from cdgrab_experiments.split import placed
from cdgrab_experiments.steps import EagerSteps, Steps
from cdgrab_experiments.tasks.base import Problem

_MOST_NUMBERS = 1 << 25  # of gradients, for the herding bound
_CHUNK = {"cpu": 2, "cuda": 4}  # batches that are evaluated at a time


class Trainer:
    """A run under way.

    Args:
        config: What to do.
        problem: A task, loaded; its model is trained in place.
        device: Where.
        capture: Replay steps as a CUDA graph, where that can be done; by default on every GPU.
    """

    def __init__(
        self, config: RunConfig, problem: Problem, *, device: str = "cpu", capture: bool | None = None
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.problem = _moved(problem, self.device)
        self.trained = 0  # epochs
        self._record, self._evaluated_last = EpochRecord(0, math.nan, {}), False
        num, spec = len(problem.train[0]), ORDERS[config.order]
        if num < config.workers:
            raise ValueError(f"{config.workers} workers, but only {num} examples; use at most as many workers")
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks not in (1, config.workers):
            raise ValueError(f"{config.workers} workers on {ranks} ranks; start as many ranks as workers, or one")
        if config.batch_size % config.workers:
            raise ValueError(
                f"a batch of {config.batch_size} cannot be shared evenly by {config.workers} workers; use a multiple"
            )
        balanced = spec.needs_gradients
        if spec.redeal and (config.partition != "iid" or problem.shards is not None):
            split = "split in stretches" if config.partition == "iid" else f"{config.partition} split"
            raise ValueError(f"order {config.order!r} deals anew every epoch, which is no {split}")
        self._batch = config.batch_size // ranks
        self.ordering = Ordering(
            num,
            batch_size=self._batch,
            unit_size=1,
            order=config.order,
            rule=config.rule,
            lanes=config.workers,
            seed=config.seed,
            # Rows in closed form are short, and many steps' travel at once: what counts is the number of messages.
            exchange="gather" if ranks > 1 and problem.gradient is not None and spec.coordinated else None,
        )
        self._places = placed(config, problem.labels, num, problem.shards)
        model: nn.Module = self.problem.model
        closed = problem.gradient is not None
        if ranks > 1 and not closed:
            # What a model carries from step to step is its rank's own.
            model = DistributedDataParallel(model, broadcast_buffers=False)
        captured = self.device.type == "cuda" and ranks == 1 and capture is not False
        self.optimizer = _optimizer(config, model, captured)
        self.scheduler = _scheduler(config, self.optimizer)
        if balanced and config.source != "exact" and (closed or problem.examples > 1):
            raise ValueError(
                f"source {config.source!r} makes short rows of single examples' layers, which {config.task} has not"
            )
        if balanced and not closed and (ranks > 1 or problem.examples == 1):
            source = self._source()
            held = HeldRows(source) if captured else None
            self.ordering.attach(model, source=held or source)
        else:
            held = None
        self._steps: Steps
        if captured:
            self._steps = CapturedSteps(
                self.problem,
                self.ordering,
                self.optimizer,
                batch=self._batch,
                balanced=balanced,
                rule=config.rule,
                held=held,
            )
        else:
            self._steps = EagerSteps(
                self.problem,
                model,
                self.ordering,
                self.optimizer,
                batch=self._batch,
                balanced=balanced,
                ranks=ranks,
            )

    def run(self) -> Iterator[EpochRecord]:
        """Train to the end, with a record after every epoch; a fresh run begins with one of the state before it."""
        if not self._evaluated_last:  # a resumed run has been
            yield self._evaluated()
        while self.trained < self.config.epochs:
            self.epoch()
            yield self._evaluated()

    def epoch(self) -> None:
        """Train for one epoch."""
        ordering, before = self.ordering, self._record
        ordering.sampler.set_epoch(self.trained)
        index_M = self._places[torch.from_numpy(ordering.remaining())].to(self.device)
        with repeatable(self.device):
            self._steps.prepare(index_M)
            if self.problem.start_epoch is not None:  # after the steps that were taken to prepare
                self.problem.start_epoch(self.problem.model)
            self._wait()
            start = time.perf_counter()
            fetching = self._steps.epoch(index_M)
            ordering.metrics()  # waits for what an attached model does beside training
            self._wait()
            seconds = time.perf_counter() - start
        self.scheduler.step()
        self.trained += 1
        ordering.sampler.set_epoch(self.trained)
        metrics = ordering.metrics()
        sorting = self._steps.seconds_sorter
        sorting = metrics.get("seconds", 0.0) if sorting is None else sorting
        exchanging = self._steps.seconds_exchange
        self._record = EpochRecord(
            self.trained,
            math.nan,
            {},
            before.seconds + seconds,
            before.seconds_data + fetching,
            before.seconds_compute + max(0.0, seconds - fetching - sorting - exchanging),
            before.seconds_exchange + exchanging,
            before.seconds_sorter + sorting,
            before.bytes + int(metrics.get("bytes", 0)),
            metrics.get("imbalance"),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after this epoch."""
        return {
            "trained": self.trained,
            "model": {key: value.detach().cpu().clone() for key, value in self.problem.model.state_dict().items()},
            # Copied: it would go on changing with the steps of the next epoch.
            "optimizer": tree_map_only(Tensor, lambda part: part.cpu().clone(), self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "ordering": self.ordering.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], last: EpochRecord) -> None:
        """Go on where `state` was taken; `last` is the record of that epoch."""
        if state["scheduler"].keys() != self.scheduler.state_dict().keys():  # PyTorch's would take anything
            raise ValueError("the state of its scheduler is of another kind")
        self.problem.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.ordering.load_state_dict(state["ordering"])
        self._steps.forget()
        self.trained, self._record, self._evaluated_last = state["trained"], last, True

    def _source(self) -> GradientSource:
        config = self.config
        if self.problem.examples > 1:
            if self._batch != 1:
                raise ValueError(
                    f"a rank's batch is {self._batch} units of {config.task}, whose gradients a backward pass does not "
                    f"tell apart; use --batch {config.workers}"
                )
            return BatchSource()
        if config.source != "exact":
            return SketchSource(length=int(config.source.removeprefix("sketch:")))
        return PerExampleSource()

    def _evaluated(self) -> EpochRecord:
        problem, model = self.problem, self.problem.model
        model.eval()
        with torch.no_grad(), repeatable(self.device):
            loss = self._loss()
            metrics = problem.evaluate(model)
            bound = self._herding_bound()
        model.train()
        self._record, self._evaluated_last = (
            replace(self._record, loss=loss, metrics=metrics, herding_bound=bound),
            True,
        )
        return self._record

    def _loss(self) -> float:
        """Of the whole training set."""
        if self.problem.whole_loss is not None:
            return self.problem.whole_loss(self.problem.model)
        train = self.problem.train
        num = len(train[0])
        # What a model makes of a batch may be far larger than the batch; models in closed form are small.
        size = num if self.problem.gradient is not None else _CHUNK[self.device.type] * self.config.batch_size
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, num, size):
            chunk = [part[start : start + size] for part in train]
            total += self.problem.loss(self.problem.model, *chunk).double() * len(chunk[0])
        return float(total) / num

    def _herding_bound(self) -> float | None:
        problem, ordering = self.problem, self.ordering
        dim = sum(p.numel() for p in problem.model.parameters())
        if problem.gradient is None or ordering.world.size > 1 or len(problem.train[0]) * dim > _MOST_NUMBERS:
            return None
        rows_ND = problem.rows(*problem.train).cpu()  # sums over time can be repeated only there
        units = min(map(len, ordering.orders))  # of workers with one more, the last is left out
        turns_WU = self._places[torch.stack([order[:units] for order in ordering.orders])]
        return herding_bound(rows_ND[turns_WU])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _moved(problem: Problem, device: torch.device) -> Problem:
    return replace(problem, model=problem.model.to(device), train=tuple(part.to(device) for part in problem.train))


def _optimizer(config: RunConfig, model: nn.Module, captured: bool) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if config.optimizer not in kinds:
        raise ValueError(f"unknown optimizer {config.optimizer!r}; choose one of sgd, adam, adamw")
    return kinds[config.optimizer](parameters, lr=config.lr, weight_decay=config.weight_decay, capturable=captured)


def _scheduler(config: RunConfig, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    kind, *numbers = config.schedule.split(":")
    try:
        if kind == "step":
            every, factor = int(numbers[0]), float(numbers[1])
            if len(numbers) > 2 or every < 1 or not 0 < factor < math.inf:
                raise ValueError("N must be at least 1 and F above 0")
            return torch.optim.lr_scheduler.StepLR(optimizer, every, factor)
        if kind == "cosine" and not numbers:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
        if kind == "constant" and not numbers:
            return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    except (ValueError, IndexError) as error:
        raise ValueError(f"schedule {config.schedule!r} cannot be read ({error}); {_SCHEDULES}") from error
    raise ValueError(f"unknown schedule {config.schedule!r}; {_SCHEDULES}")


_SCHEDULES = "choose constant, step:N:F (times F every N epochs) or cosine"

"""What a task is: a data set, a model, a loss and a metric, with the settings they are usually trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    """How a task is trained unless the command line says otherwise.

    Attributes:
        workers: Number of workers.
        batch_size: Examples in a step, of all workers together.
        schedule: `"constant"`, `"step:N:F"` (times F every N epochs) or `"cosine"` (to zero over the run).
    """

    workers: int
    batch_size: int
    epochs: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"


@dataclass(frozen=True)
class LateRows:
    """Rows made for many steps at once, from the little that a step keeps for them.

    Where a step takes some microseconds, writing its own rows would be a good part of it.

    Attributes:
        gradient: `gradient(model, *batch, kept=places)`: the same numbers as those of `Problem.gradient`; what is kept
            is written into the places.
        sizes: `sizes(units)`: the shapes of these places.
        rows: `rows(kept, *batch)`: gradients of units, `steps x units x dim`, the same numbers as those of
            `Problem.gradient`. Whatever was kept, and the batches, have the steps as their first dimension.
    """

    gradient: Callable[..., Tensor]
    sizes: Callable[[int], tuple[tuple[int, ...], ...]]
    rows: Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    """A task whose data have been read and whose model has been made, on the CPU.

    Attributes:
        model: To be trained.
        train: Tensors with one entry per unit along the first dimension; what `loss` takes. A unit is an example, or
            several that always go together.
        loss: `loss(model, *batch)`: the mean over the units of a batch, where `batch` is `train`, indexed.
        evaluate: Figures on data that are not trained on, by name; outside of the timed part.
        metric: The name among them that counts.
        higher_is_better: Of the metric.
        data: One line on the data for reports: what they are, how many, and whether they stand in for others.
        labels: A class for every unit, for splits that are not even; None if there are none.
        gradient: `gradient(model, *batch, rows=None)`: the gradient of `loss` in closed form, `dim` numbers in the
            order of `model.parameters()`, for models so small that automatic differentiation would be most of the
            time. If `rows` is given, `units x dim`, it is filled with the gradient of every unit. Tested against
            automatic differentiation.
        late: The same with rows for many steps at once, if that is faster.
        minimum: Finds the smallest possible training loss, where it can be known.
        examples: How many examples make a unit; layers see them along their first dimension, one after the other.
        unit_rows: `unit_rows(model, *batch, rows=...)` fills `rows`, `units x dim`, with the gradient of every unit,
            from one backward pass; for units of several examples, on a GPU. By default every unit has one of its own.
        shards: Into how many equal stretches `train` is cut, each of which belongs to one worker; a step takes one unit
            of each. None: units are dealt to workers.
        clip: Largest norm of the gradient of a batch; rows of units are never clipped. None: no limit.
        start_epoch: Called before the first step of an epoch, for a model that carries a state from step to step.
        whole_loss: Finds the loss of the whole training set; by default it is the mean of `loss` over its batches.
    """

    model: nn.Module
    train: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    metric: str
    higher_is_better: bool
    data: str
    labels: Tensor | None = None
    gradient: Callable[..., Tensor] | None = None
    late: LateRows | None = None
    minimum: Callable[[], float] | None = None
    examples: int = 1
    unit_rows: Callable[..., None] | None = None
    shards: int | None = None
    clip: float | None = None
    start_epoch: Callable[[nn.Module], None] | None = None
    whole_loss: Callable[[nn.Module], float] | None = None

    def rows(self, *batch: Tensor) -> Tensor:
        """The gradient of every unit, from `gradient`."""
        assert self.gradient is not None
        parameters = list(self.model.parameters())
        rows_ND = parameters[0].new_empty(len(batch[0]), sum(p.numel() for p in parameters))
        self.gradient(self.model, *batch, rows=rows_ND)
        return rows_ND


@dataclass(frozen=True)
class Task:
    """A task by name.

    Attributes:
        title: A few words for headings.
        settings: Its defaults, after the paper where the paper has it.
        load: `load(folder, variant, seed)`: reads the data under `folder` and makes the model from `seed`.
        needs: Names of data sets (`data.py`) of which one must be there; the first that is will be used.
            None for data that come with the program.
        variants: What `--variant` may be; the first is the default.
        extras: Packages beyond those of the extra `paper`, for the message if one is missing.
    """

    name: str
    title: str
    settings: Settings
    load: Callable[[Path, str, int], Problem]
    needs: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("",)
    extras: tuple[str, ...] = ()

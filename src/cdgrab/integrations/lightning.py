"""Lightning: a callback for its Trainer. Fabric needs none: `cdgrab.ordered` before `fabric.setup_dataloaders`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from cdgrab.integrations.figures import figures
from cdgrab.loaders import recipe_of
from cdgrab.ordering import Ordering

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError:  # the same library under its other name
        from pytorch_lightning import Callback, LightningModule, Trainer


class BalancedOrder(Callback):
    """Visits training examples in a balanced order: `Trainer(callbacks=[BalancedOrder()])`.

    The loader may come from `fit`, from the module or from a `LightningDataModule`. Checkpoints hold the order, and
    `fit(..., ckpt_path=...)` goes on at the batch where they were saved. The figures of an epoch are logged as
    `cdgrab/imbalance` and so on.

    Args:
        source: As for `Ordering.attach`.
        options: Further arguments of `Ordering`.

    Attributes:
        ordering: The ordering, from the begin of training on.
    """

    def __init__(self, *, source: Any = "auto", **options: Any) -> None:
        self.ordering: Ordering | None = None
        self._source, self._options = source, options
        self._state: dict[str, Any] = {}
        self._made = (0, 0)  # in which epoch, for how many examples
        self._undo: Callable[[], None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Have the training loader pass by here, after Lightning has given it its sampler."""
        if stage != "fit":
            return
        self.ordering = None
        strategy = trainer.strategy
        plain = strategy.process_dataloader

        def process(loader: object) -> object:
            return plain(self._reordered(trainer, loader) if trainer.training else loader)

        strategy.process_dataloader = process  # type: ignore[assignment, method-assign]
        self._undo = lambda: setattr(strategy, "process_dataloader", plain)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the figures of the epoch."""
        if self.ordering is not None:
            pl_module.log_dict(figures(self.ordering), sync_dist=trainer.world_size > 1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Leave model and strategy as they were."""
        if self._undo is not None:
            self._undo()
            self._undo = None
            if self.ordering is not None:
                self.ordering.detach()

    def state_dict(self) -> dict[str, Any]:
        """The order of all ranks."""
        return {} if self.ordering is None else self.ordering.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep an order until there is a loader for it."""
        self._state = state_dict

    def _reordered(self, trainer: Trainer, loader: Any) -> Any:
        recipe = recipe_of(loader)
        if recipe.kind is not DataLoader:
            raise ValueError(
                f"the loader is a {recipe.kind.__name__}, which keeps a position of its own; use a DataLoader: the "
                "ordering knows what is left of an epoch"
            )
        recipe = replace(recipe, kind=_Resumable)
        if self.ordering is None:
            self.ordering = recipe.ordering(trainer.accumulate_grad_batches, **self._options)
            assert trainer.model is not None
            self.ordering.attach(trainer.model, source=self._source)
            if self._state:
                self.ordering.load_state_dict(self._state)
                self._state = {}
            self._made = trainer.current_epoch, len(recipe.dataset)
        elif trainer.current_epoch == self._made[0]:
            raise ValueError(
                "there are several training loaders, and a balanced order is that of one; concatenate the datasets, "
                "or make a cdgrab.Ordering for the loader that matters"
            )
        elif len(recipe.dataset) != self._made[1]:
            raise ValueError(
                f"the loader was reloaded with {len(recipe.dataset)} examples, and the order is one of "
                f"{self._made[1]}; leave out reload_dataloaders_every_n_epochs"
            )
        return recipe.loader(self.ordering)


class _Resumable(DataLoader[Any]):
    """A loader that can be resumed, which Lightning asks for: the ordering knows what is left."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the callback has loaded the ordering."""


__all__ = ["BalancedOrder"]

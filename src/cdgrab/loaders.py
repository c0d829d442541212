"""`ordered`: the loader that somebody already has, in a balanced order. Integrations build on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from cdgrab.arguments import whole_number
from cdgrab.ordering import Ordering
from cdgrab.sampler import OrderedSampler

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


@dataclass(frozen=True)
class Recipe:
    """What a loader was made from, apart from its order; made by `recipe_of`.

    Attributes:
        kind: The class of the loader.
        batch_size: Examples of this process in a batch.
        options: All other arguments of the loader.
    """

    kind: type[DataLoader[Any]]
    dataset: Any
    batch_size: int
    drop_last: bool
    options: dict[str, Any]

    def ordering(self, accumulate: int = 1, **options: Any) -> Ordering:
        """An ordering that fits the loader; `ordered` explains the arguments."""
        told_twice = {"dataset", "batch_size", "drop_last"} & options.keys()
        if told_twice:
            raise ValueError(
                f"{', '.join(sorted(told_twice))} was given, which the loader says already; leave it out, or change "
                "the loader"
            )
        if whole_number("accumulate", accumulate, least=1) > 1:
            # Without a unit_size, a model that shows no single examples would get batches as units: half an
            # accumulated gradient each.
            asked = options.get("unit_size") or 1
            options["unit_size"] = accumulate * self.batch_size if asked == self.batch_size > 1 else asked
        return Ordering(self.dataset, batch_size=self.batch_size, drop_last=self.drop_last, **options)

    def loader(self, ordering: Ordering) -> DataLoader[Any]:
        """The loader again, in the order of `ordering`."""
        return self.kind(
            self.dataset,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            sampler=ordering.sampler,
            **self.options,
        )


def ordered(loader: DataLoader[Any], *, accumulate: int = 1, **options: Any) -> tuple[Ordering, DataLoader[Any]]:
    """An ordering for the dataset of a loader, and the same loader in its order.

    Everything but the order is taken over: dataset, batch size, collator, workers, `drop_last`. On many ranks every
    rank calls it, with a loader of its own batch size; the loader may have a `DistributedSampler` or none.

    Args:
        loader: A `DataLoader`, or torchdata's `StatefulDataLoader`, over a map-style dataset. Its sampler may be
            sequential, random or a `DistributedSampler`; any other would be lost, and is refused.
        accumulate: Batches whose gradients are accumulated for a step. If units are batches (`unit_size` is the batch
            size), a unit is then what is accumulated. Single examples are ordered as without it.
        options: Further arguments of `Ordering`.

    Example:
        >>> import torch
        >>> ordering, loader = ordered(DataLoader(range(6), batch_size=2, shuffle=True), seed=1)
        >>> sorted(torch.cat(list(loader)).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    recipe = recipe_of(loader)
    ordering = recipe.ordering(accumulate, **options)
    return ordering, recipe.loader(ordering)


def recipe_of(loader: Any, *, batches: Any = None) -> Recipe:
    """What `loader` was made from; raises `ValueError` if its order cannot be replaced by another.

    Args:
        loader: The loader.
        batches: Its batch sampler, if it has been wrapped.
    """
    check_dataset(getattr(loader, "dataset", None))
    kind = _kind(loader)
    batches = loader.batch_sampler if batches is None else batches
    if batches is None:
        raise ValueError("the loader has batch_size=None; give it a batch size, since batches are what is ordered")
    if not _is_plain(batches, BatchSampler):
        raise ValueError(
            f"the loader has a batch_sampler of its own, {type(batches).__name__}, which chooses the batches; pass "
            "batch_size= to the loader instead"
        )
    if not loader.in_order:
        raise ValueError(
            "the loader has in_order=False, so batches overtake each other and gradients would go to the wrong "
            "examples; leave it out"
        )
    _check_sampler(batches.sampler, loader.dataset)
    options = {name: getattr(loader, name) for name in _KEPT}
    if hasattr(loader, "snapshot_every_n_steps"):
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    return Recipe(kind, loader.dataset, batches.batch_size, batches.drop_last, options)


def _check_sampler(sampler: Any, dataset: Any) -> None:
    """Raise `ValueError` if `sampler` does more than to visit every example once."""
    if isinstance(sampler, OrderedSampler):
        raise ValueError("the loader is in a balanced order already; use the ordering that it was made with")
    if isinstance(sampler, SequentialSampler) or _is_plain(sampler, DistributedSampler):
        return
    if isinstance(sampler, RandomSampler) or _is_plain(sampler, RandomSampler):
        if not sampler.replacement and sampler.num_samples == len(dataset):
            return
        raise ValueError(
            f"the loader draws {sampler.num_samples} of {len(dataset)} examples (replacement={sampler.replacement}), "
            "but a balanced order visits every example once in an epoch; use shuffle=True, or a Subset of the dataset"
        )
    found = type(sampler).__name__ if isinstance(sampler, Sampler) else f"a {type(sampler).__name__} as sampler"
    raise ValueError(
        f"the loader has {found}, whose choice of examples would be lost; accepted are shuffle=True, shuffle=False "
        "and DistributedSampler. For a part of the data pass a Subset of it; for weights repeat its indices"
    )


def _kind(loader: Any) -> type[DataLoader[Any]]:
    """The class to make the loader with; raises `ValueError` unless it is known how."""
    kind: type[Any] = type(loader)
    if _is_plain(loader, DataLoader):
        return kind
    if hasattr(loader, "base_dataloader"):
        remedy = "it was prepared by Accelerate: use cdgrab.integrations.accelerate.balance(accelerator, model, loader)"
    elif kind.__name__ == "_FabricDataLoader":
        remedy = "pass it as it was before fabric.setup_dataloaders() to cdgrab.integrations.fabric.balance()"
    elif isinstance(loader, DataLoader):
        remedy = "it may do more than a DataLoader: make cdgrab.Ordering(...) and pass it sampler=ordering.sampler"
    else:
        remedy = "pass a torch.utils.data.DataLoader, or make cdgrab.Ordering(...) and use ordering.sampler"
    raise ValueError(f"the loader is a {kind.__name__}; {remedy}")


def _is_plain(found: Any, kind: type[Any]) -> bool:
    """Whether `found` is an instance of this class of PyTorch's itself, or of torchdata's version of it."""
    name = type(found).__name__.removeprefix("Stateful")
    return type(found) is kind or (name == kind.__name__ and type(found).__module__.startswith("torchdata."))


def check_dataset(dataset: Any) -> None:
    """Raise `ValueError` if a dataset streams its examples, so that nothing can be reordered."""
    streams = isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
    )
    if dataset is not None and streams:
        raise ValueError(
            f"{type(dataset).__name__} is an iterable-style (streaming) dataset, which chooses its own order; use a "
            "map-style dataset, with __getitem__ and __len__: load it without streaming, materialise its examples, or "
            "wrap a store that can be read at any index"
        )


__all__ = ["ordered"]

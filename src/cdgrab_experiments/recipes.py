"""Every figure and table of the paper as a list of runs, with the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cdgrab_experiments.choices import Choices, nearest, resolve
from cdgrab_experiments.config import RunConfig

_PAIR = ("rr", "cd-grab")


@dataclass(frozen=True)
class Recipe:
    """One figure or table.

    Attributes:
        title: What it shows.
        seeds: How many the paper used.
        settings: The runs of one seed, by order.
    """

    name: str
    title: str
    seeds: int
    settings: Callable[[], list[RunConfig]]

    def configs(self, seeds: int | None = None, epochs: int | None = None) -> list[RunConfig]:
        """All runs, seed by seed, so that there is something to compare early."""
        return [
            replace(config, seed=seed, epochs=epochs or config.epochs)
            for seed in range(seeds or self.seeds)
            for config in self.settings()
        ]


def _of(task: str, orders: tuple[str, ...] = _PAIR, **choices: object) -> list[RunConfig]:
    return [resolve(task, Choices(order=order, **choices)) for order in orders]  # type: ignore[arg-type]


def _cifar10_workers() -> list[RunConfig]:
    orders = ("rr", "cd-grab", "id-grab", "pair")
    return [config for workers in (4, 8, 16, 32, 64) for config in _of("cifar10", orders, workers=workers)]


def _cifar10_steps() -> list[RunConfig]:
    return [config for lr in (5e-4, 1e-3, 5e-3, 1e-2) for config in _of("cifar10", workers=64, lr=lr)]


def _sketches() -> list[RunConfig]:
    sources = [f"sketch:{length}" for length in (1024, 512, 256)]
    short = [config for source in sources for config in _of("cifar10", ("cd-grab",), workers=64, source=source)]
    return [*_of("cifar10", workers=64), *short]


def _splits() -> list[RunConfig]:
    return [
        config
        for split in ("iid", "dirichlet:1", "dirichlet:0.1", "sorted")
        for config in _of("mnist", partition=split)
    ]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("hmda", "logistic regression on mortgages, 4 workers: loss and accuracy", 5, lambda: _of("hmda")),
        Recipe("wikitext2", "LSTM on WikiText-2, 4 workers: loss and perplexity", 5, lambda: _of("wikitext2")),
        Recipe("m4", "autoregressive MLP on M4 Weekly, 4 workers: loss and sMAPE", 5, lambda: _of("m4")),
        Recipe(
            "m4-32",
            "the same with 32 workers, as the authors' command line says",
            5,
            lambda: _of("m4", workers=32, batch_size=32),
        ),
        Recipe("gpt2", "tiny GPT-2 on WikiText-103 (or -2), 64 workers: loss and perplexity", 3, lambda: _of("gpt2")),
        Recipe(
            "cifar10-workers", "LeNet on CIFAR-10, 4 to 64 workers, with and without coordination", 3, _cifar10_workers
        ),
        Recipe("cifar10-steps", "LeNet on CIFAR-10, 64 workers, four step sizes", 3, _cifar10_steps),
        Recipe(
            "glue-rte",
            "fine-tuning on RTE (the paper's first version; no figures published)",
            3,
            lambda: _of("glue", variant="rte"),
        ),
        Recipe("glue-cola", "fine-tuning on CoLA, likewise", 3, lambda: _of("glue", variant="cola")),
        Recipe("a9a", "not in the paper: logistic regression on census income", 5, lambda: _of("a9a")),
        Recipe("sketches", "not in the paper: what sketches of gradients give up on CIFAR-10", 2, _sketches),
        Recipe("splits", "not in the paper: uneven splits of MNIST between workers", 3, _splits),
    )
}
HERDING = "herding"  # random vectors, which no model is trained for
HERDING_TITLE = "parallel herding of random vectors, 5 to 100 workers (runs cdgrab verify herding)"


def find_recipe(name: str) -> Recipe:
    """A recipe by name."""
    if name not in RECIPES:
        known = [*RECIPES, HERDING]
        raise ValueError(f"unknown figure {name!r}{nearest(name, known)}; choose one of {', '.join(known)}")
    return RECIPES[name]

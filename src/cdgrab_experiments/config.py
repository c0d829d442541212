"""What one run does, as plain data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from cdgrab_experiments.schema import build


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of a run.

    Attributes:
        variant: Of the task, where it has several.
        batch_size: Examples in a step, of all workers together.
        source: How gradients of units are found: `"exact"`, or `"sketch:LENGTH"` for short rows.
        schedule: See `tasks.base.Settings`.
        partition: How examples are split between workers: `"iid"`, `"sorted"` (by class) or `"dirichlet:ALPHA"`.
    """

    task: str
    variant: str
    order: str
    rule: str
    source: str
    workers: int
    batch_size: int
    epochs: int
    seed: int
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    schedule: str
    partition: str

    @property
    def contender(self) -> str:
        """The order, with rule and source where they are not the usual ones: what is compared with each other."""
        name = self.order if self.rule == "greedy" else f"{self.order} ({self.rule})"
        return name if self.source == "exact" else f"{name}, {self.source.replace(':', ' of ').replace('-', ' ')}"

    @property
    def setting(self) -> RunConfig:
        """The run without what is compared and averaged over: equal for runs that belong in one comparison."""
        return replace(self, order="", rule="", source="", seed=0)

    @property
    def title(self) -> str:
        """The setting in words."""
        name = f"{self.task} ({self.variant})" if self.variant else self.task
        split = "" if self.partition == "iid" else f", {self.partition} split"
        return f"{name}, {self.workers} workers{split}"

    @property
    def folder_name(self) -> str:
        """Readable, and different for every configuration."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        parts = [self.order, self.rule if self.rule != "greedy" else "", self.source if self.source != "exact" else ""]
        what = "-".join(part.replace(":", "-") for part in parts if part)
        return f"{what}_w{self.workers}_seed{self.seed}_{digest}"

    @classmethod
    def from_dict(cls, found: Any) -> RunConfig:
        """The configuration in a record; raises `ValueError` for what cannot be one."""
        made = build(cls, found)
        if min(made.workers, made.batch_size) < 1 or min(made.epochs, made.seed) < 0:
            raise ValueError("workers and batch_size must be at least 1, epochs and seed at least 0")
        return made

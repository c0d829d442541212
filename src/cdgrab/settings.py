"""The checked arguments of an ordering, and what follows from them alone.

They stay the same while the ordering lives. `epochs.py` holds what changes from step to step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from cdgrab.arguments import Fingerprint, checked_fingerprint, checked_lanes, checked_unit_size, length_of, whole_number
from cdgrab.balancing.rules import RuleMaker, find_rule
from cdgrab.exchange import ExchangeMaker
from cdgrab.exchange.agreement import check_same
from cdgrab.lanes import Lanes, deal
from cdgrab.orders import OrderSpec, find_order
from cdgrab.world import Group, World, process_group


@dataclass(frozen=True)
class Settings:
    """The arguments of `Ordering`, with all defaults filled in; made by `Settings.checked`.

    Attributes:
        batch_size: The examples of this process in a full batch.
        units_are_given: Whether the user has said how examples make units, or units lanes.
        lanes: The number of lanes of all processes.
        order: The name of the order; `spec` is its definition.
        rule: The name of the rule, `"custom"` if it has none; `make_rule` makes one.
        group: The ranks among which data are dealt.
        fingerprint: What tells the dataset from others, or None.
    """

    num_examples: int
    batch_size: int
    unit_size: int
    units_are_given: bool
    lanes: int
    order: str
    spec: OrderSpec
    rule: str
    make_rule: RuleMaker
    world: World
    world_is_detected: bool
    seed: int
    drop_last: bool
    block: int | None
    group: dist.ProcessGroup | None
    fingerprint: str | None = None

    @classmethod
    def checked(
        cls,
        dataset: Dataset[Any] | Sized | int,
        *,
        batch_size: int,
        unit_size: int | None,
        lanes: int | None,
        order: str,
        rule: str | RuleMaker,
        world: World | None,
        seed: int,
        drop_last: bool,
        block: int | None,
        group: Group,
        fingerprint: Fingerprint = None,
    ) -> Settings:
        """Settings from a user's arguments; raises `ValueError` if one is invalid or they do not fit together."""
        num_examples = length_of(dataset)
        seed = whole_number("seed", seed, least=0)
        ranks = process_group(group)
        detected = world is None
        world = world or World.detect(ranks)
        batch_size = whole_number("batch_size", batch_size, least=1)
        spec = find_order(order)
        units_are_given = unit_size is not None or lanes is not None
        unit_size = checked_unit_size(unit_size, batch_size)
        settings = cls(
            num_examples=num_examples,
            batch_size=batch_size,
            unit_size=unit_size,
            units_are_given=units_are_given,
            lanes=checked_lanes(lanes, world, max(1, batch_size // unit_size)),
            order=order,
            spec=spec,
            rule=rule if isinstance(rule, str) else "custom",
            make_rule=find_rule(rule),
            world=world,
            world_is_detected=detected,
            seed=seed,
            drop_last=drop_last,
            block=None if block is None else whole_number("block", block, least=1),
            group=ranks,
            fingerprint=checked_fingerprint(fingerprint, dataset),
        )
        settings._check_world()
        return settings

    def with_batches_as_units(self) -> Settings:
        """The same, but every batch of a process is a unit, and every process has a lane."""
        return replace(self, unit_size=self.batch_size, units_are_given=True, lanes=self.world.size)

    @cached_property
    def units_per_batch(self) -> int:
        """The units of this process in a full batch; 1 if several batches make a unit."""
        return max(1, self.batch_size // self.unit_size)

    @property
    def balances_pairs(self) -> bool:
        """Whether differences of pairs are balanced."""
        return self.spec.centring == "pair"

    @property
    def decides_signs(self) -> bool:
        """Whether the order comes from signs."""
        return self.spec.centring is not None

    @property
    def coordinated(self) -> bool:
        """Whether all lanes are balanced together."""
        return self.spec.coordinated

    @cached_property
    def local_lanes(self) -> range:
        """The lanes of this process."""
        return range(self.world.rank, self.lanes, self.world.size)

    @cached_property
    def sorted_lanes(self) -> range:
        """The lanes whose rows come to this process's sorter."""
        return range(self.lanes) if self.coordinated else self.local_lanes

    @cached_property
    def remembers(self) -> str | None:
        """The state that carries over between epochs besides the order, in words: draws, a mean, or None."""
        if self.rule != "greedy":
            return f"rule {self.rule!r}"
        return f"order {self.order!r}" if self.spec.centring == "mean" else None

    @property
    def ranks_meet(self) -> bool:
        """Whether there are other ranks to communicate with. A `World` made by hand, as in tests, has none."""
        return self.world.size > 1 and dist.is_available() and dist.is_initialized()

    def deal(self, epoch: int) -> Lanes:
        """The lanes of `epoch`: the same in all epochs, except for orders that deal again."""
        return deal(
            self.num_examples,
            self.world,
            lanes=self.lanes,
            unit_size=self.unit_size,
            seed=self.seed,
            epoch=epoch if self.spec.redeal else 0,
            whole_batches=self.batch_size if self.drop_last else None,
            shuffle=self.spec.shuffle,
        )

    def config(self, lanes: Lanes) -> dict[str, Any]:
        """The values that a state must share with the ordering; `lanes` are those of the first epoch."""
        return {
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            "unit_size": self.unit_size,
            "lanes": self.lanes,
            "order": self.order,
            "rule": self.rule,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "world_size": self.world.size,
            "fingerprint": self.fingerprint,
            "dealt": zlib.crc32(lanes.head[:1024].tobytes()),
        }

    def check_ranks(self, config: dict[str, Any], exchange: str | ExchangeMaker | None) -> None:
        """Raise `ValueError` if ranks were given different arguments."""
        if self.ranks_meet:
            check_same("the ordering", {**config, "exchange": "custom" if callable(exchange) else exchange}, self.group)

    def check_world_is_the_same(self) -> None:
        """Raise `ValueError` if rank or size have changed since the ordering was made."""
        if self.world_is_detected and dist.is_available() and dist.is_initialized():
            found = World.detect(self.group)
            if found != self.world:
                raise ValueError(
                    f"the ordering was made for a world of {self.world.size}, and torch.distributed has {found.size} "
                    "ranks now; make the ordering after init_process_group(), on every rank"
                )

    def _check_world(self) -> None:
        if self.ranks_meet:
            rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if (rank, size) != (self.world.rank, self.world.size):
                raise ValueError(
                    f"world= is rank {self.world.rank} of {self.world.size}, but the process group has rank {rank} of "
                    f"{size}; leave world= out and pass group= if there are several"
                )

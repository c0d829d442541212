"""What an ordering was asked for, checked, and what follows from that alone.

All of it stays the same while the ordering lives. What changes from step to step is in `ordering.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from cdgrab.arguments import checked_lanes, checked_unit_size, length_of, whole_number
from cdgrab.balancing.rules import RuleMaker, find_rule
from cdgrab.exchange import ExchangeMaker
from cdgrab.exchange.agreement import check_same
from cdgrab.lanes import Lanes, deal
from cdgrab.orders import OrderSpec, find_order
from cdgrab.world import Group, World, process_group


@dataclass(frozen=True)
class Settings:
    """The arguments of `Ordering`, with nothing left open; made by `Settings.checked`.

    Attributes:
        batch_size: Examples of this process in a full batch.
        lanes: Of all processes.
        order: The name of the order; `spec` is what it stands for.
        rule: The name of the rule, `"custom"` if it has none; `make_rule` makes one.
        group: The ranks among which data are dealt.
    """

    num_examples: int
    batch_size: int
    unit_size: int
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
    ) -> Settings:
        """Check what a user has passed; raises `ValueError` if it does not fit together."""
        num_examples = length_of(dataset)
        seed = whole_number("seed", seed, least=0)
        ranks = process_group(group)
        detected = world is None
        world = world or World.detect(ranks)
        batch_size = whole_number("batch_size", batch_size, least=1)
        spec = find_order(order)
        unit_size = checked_unit_size(unit_size, None if spec.needs_gradients else 1, batch_size)
        settings = cls(
            num_examples=num_examples,
            batch_size=batch_size,
            unit_size=unit_size,
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
        )
        settings._check_world()
        return settings

    @cached_property
    def units_per_batch(self) -> int:
        """Units of this process in a full batch, or the one that several batches make."""
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
        """Whether the rows of all lanes decide together."""
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
        """What else than orders goes on from one epoch to the next, in words: draws of the rule, or a mean."""
        if self.rule != "greedy":
            return f"rule {self.rule!r}"
        return f"order {self.order!r}" if self.spec.centring == "mean" else None

    @property
    def ranks_meet(self) -> bool:
        """Whether there are other ranks to talk to. A world made by hand, for tests and studies, has none."""
        return self.world.size > 1 and dist.is_available() and dist.is_initialized()

    def deal(self, epoch: int) -> Lanes:
        """The lanes of `epoch`; but for orders that deal anew they are always the same."""
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
        """What must be the same for a state to fit; `lanes` are those of the first epoch."""
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
            "rank": self.world.rank,
            "dealt": zlib.crc32(lanes.dealt.tobytes()),
        }

    def check_ranks(self, config: dict[str, Any], exchange: str | ExchangeMaker | None) -> None:
        """Whether all ranks were asked for the same."""
        if self.ranks_meet:
            same = {key: value for key, value in config.items() if key != "rank"}
            check_same("the ordering", {**same, "exchange": "custom" if callable(exchange) else exchange}, self.group)

    def check_world_is_the_same(self) -> None:
        """Refuse to go on if there are other ranks now than when the ordering was made."""
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
                    f"world says rank {self.world.rank} of {self.world.size}, the process group rank {rank} of {size}; "
                    "pass group= and leave world= out"
                )

"""Lanes: deals examples into units, and units into lanes.

A *unit* is what an order permutes: one example, or `unit_size` examples whose gradient is observed as one row. A *lane*
is a sequence of units that is reordered on its own, in step with the other lanes. A *visit* is one unit of every lane.
Examples are dealt as `torch.utils.data.DistributedSampler` deals them: rank `k` of `W` gets every `W`-th example of a
seeded permutation, from the `k`-th on. Its units, in dealt order, go to its lanes in turn:

    unit          0  1  2  3  4  5  6  7  ...
    local lane    0  1  2  3  0  1  2  3  ...        with 4 lanes on this rank, a visit is a line of 4

Local lane `j` of rank `k` is lane `k + W j` of all. So, if units are single examples, lane `l` of `L` holds every
`L`-th example of the permutation, on any number of ranks.

Every process visits `num_samples` examples in an epoch:

    ordered units ............ | rest: examples that fill no unit, then padding

Only the units move. The rest comes last in every epoch, so that unit and batch boundaries stay where they are. Its rows
are accepted and ignored. Padding repeats examples so that all processes take equally many steps, as with
`DistributedSampler`. It is never part of an order.

Shapes: `N` units of this process, `J` lanes of it, `L` lanes in all, `m` visits, `u` examples in a unit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cdgrab.world import World

IntArray = npt.NDArray[np.signedinteger]
BoolArray = npt.NDArray[np.bool_]

_HEAD = 1024


@dataclass(frozen=True, eq=False)
class Lanes:
    """The units of this process's lanes.

    Attributes:
        num_lanes: The number of lanes of all processes.
        num_samples: The examples that every process visits in an epoch, padding included.
        shard: The examples of this process, as dealt or in a later order. Its units are numbered in this order.
        dealt_in: The epoch whose permutation was dealt.
        head: The first examples of that permutation: padding in that epoch, and a sign of how it was dealt.
    """

    num_examples: int
    world: World
    num_lanes: int
    unit_size: int
    num_samples: int
    seed: int
    shard: IntArray
    dealt_in: int
    head: IntArray

    @functools.cached_property
    def num_local(self) -> int:
        """The number of lanes of this process."""
        return self.num_lanes // self.world.size

    @property
    def local(self) -> range:
        """The lanes of this process, numbered among all lanes."""
        return range(self.world.rank, self.num_lanes, self.world.size)

    @functools.cached_property
    def units_Nu(self) -> IntArray:
        """The dataset indices of every unit of this process."""
        whole = len(self.shard) - len(self.shard) % self.unit_size
        units_Nu: IntArray = self.shard[:whole].reshape(-1, self.unit_size)
        return units_Nu

    @property
    def num_units(self) -> int:
        """The number of units of this process."""
        return len(self.units_Nu)

    @functools.cached_property
    def num_rows(self) -> int:
        """The number of rows this process observes in an epoch: those of visited units, and of the rest."""
        return -(-self.num_samples // self.unit_size)

    @functools.cached_property
    def num_visits(self) -> int:
        """The number of visits in an epoch; in the last, some lanes may have no unit."""
        return -(-self.num_rows // self.num_local)

    @functools.cached_property
    def num_visited(self) -> int:
        """The number of units that an epoch visits whole: all of them, unless `drop_last` cuts the epoch."""
        return self._visited_by(self.world.rank)

    @functools.cached_property
    def visited_L(self) -> IntArray:
        """The number of units that an epoch visits in each lane."""
        rank_L, local_L = np.arange(self.num_lanes) % self.world.size, np.arange(self.num_lanes) // self.world.size
        visited_R = np.array([self._visited_by(rank) for rank in range(self.world.size)])
        visited_L: IntArray = -((local_L - visited_R[rank_L]) // self.num_local)
        return visited_L

    @functools.cached_property
    def _whole_visits(self) -> int:
        return int(self.visited_L.min())

    def counts(self, start: int, visits: int, lanes: range) -> BoolArray | None:
        """Which of `lanes` have a unit in each of `visits` visits from `start` on; None: all have."""
        if start + visits <= self._whole_visits:
            return None
        return np.arange(start, start + visits)[:, None] < self.visited_L[lanes]

    def lane_of(self, units: IntArray) -> IntArray:
        """The local lanes of units of this process."""
        return units % self.num_local

    def padding(self, epoch: int) -> IntArray:
        """The examples this process repeats at the end of `epoch`: the first dealt, in later epochs random ones."""
        size = self.world.size
        length = max(0, self.num_samples * size - self.num_examples)
        if epoch == self.dealt_in:
            repeated = self.head[np.arange(length) % len(self.head)]
        else:
            repeated = generator(self.seed, epoch, "padding").integers(self.num_examples, size=length)
        # Position `num_examples + i` of the padded list belongs to rank `(num_examples + i) mod size`.
        mine: IntArray = repeated[(self.num_examples + np.arange(length)) % size == self.world.rank]
        return mine

    def examples(self, order_N: IntArray, padding: IntArray) -> IntArray:
        """The dataset indices in the order in which an epoch visits them."""
        return np.concatenate([self.in_order(order_N), padding])[: self.num_samples]

    def in_order(self, order_N: IntArray) -> IntArray:
        """All examples of this process: those of its units in this order, then those that fill no unit."""
        return np.concatenate([self.units_Nu[order_N].reshape(-1), self.shard[self.units_Nu.size :]])

    @functools.cached_property
    def unit_of(self) -> IntArray:
        """The unit of this process that each dataset index belongs to, or -1."""
        found = np.full(self.num_examples, -1, dtype=narrowest(self.num_units))
        found[self.units_Nu] = np.arange(self.num_units)[:, None]
        return found

    def _visited_by(self, rank: int) -> int:
        dealt = (self.num_examples - rank + self.world.size - 1) // self.world.size
        return min(dealt, self.num_samples) // self.unit_size


def deal(
    num_examples: int,
    world: World,
    *,
    lanes: int | None = None,
    unit_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    whole_batches: int | None = None,
    shuffle: bool = True,
) -> Lanes:
    """Deal `num_examples` examples, index for index as `DistributedSampler` does in `epoch`.

    With `whole_batches` every process visits the largest multiple of that number for which no padding is needed.
    """
    if shuffle:
        # On the CPU, whatever the default device is: so is DistributedSampler's generator.
        random = torch.Generator("cpu").manual_seed(seed + epoch)
        dealt = torch.randperm(num_examples, generator=random, device="cpu").numpy()
    else:
        dealt = np.arange(num_examples)
    num_samples = samples_each(num_examples, world, whole_batches)
    dealt = dealt.astype(narrowest(num_examples), copy=False)
    shard, head = dealt[world.rank :: world.size].copy(), dealt[: max(world.size, _HEAD)].copy()
    return Lanes(num_examples, world, lanes or world.size, unit_size, num_samples, seed, shard, epoch, head)


def samples_each(num_examples: int, world: World, whole_batches: int | None = None) -> int:
    """The number of examples that every process visits in an epoch, padding included."""
    if whole_batches is None:
        return math.ceil(num_examples / world.size)
    num_samples = num_examples // world.size // whole_batches * whole_batches
    if num_samples == 0:
        raise ValueError(
            f"{num_examples} examples do not fill one batch of {whole_batches} on each of {world.size} processes, "
            "so drop_last=True leaves none; use drop_last=False, a smaller batch or fewer processes"
        )
    return num_samples


def narrowest(count: int) -> np.dtype[np.signedinteger]:
    """The narrowest integer type for the numbers below `count`, and -1."""
    return np.min_scalar_type(-max(1, count))


def generator(seed: int, *stream: int | str) -> np.random.Generator:
    """A random generator: the same for the same `seed` and `stream`, independent of all others."""
    words = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in stream]
    return np.random.default_rng([seed, *words])

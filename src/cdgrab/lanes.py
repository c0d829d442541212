"""Which examples belong to which worker, and which of them form a unit.

A *unit* is what an order permutes: one example, or a fixed group of `unit_size` examples whose gradient is
observed as one row. Examples are dealt as `torch.utils.data.DistributedSampler` deals them: example `i` of a
seeded permutation goes to worker `i mod size`. They stay with that worker for good.

A worker visits `num_samples` examples per epoch, the same number on every worker, in *slots* of `unit_size`:

    ordered units ............ | rest: examples that fill no unit, then padding

Only the ordered units move. The rest comes last in every epoch, so that unit and batch boundaries stay aligned;
its rows are accepted and ignored. Padding repeats examples so that all workers take equally many steps (as
`DistributedSampler` does); it is never part of an order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cdgrab.world import World

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Units:
    """The examples of this process's workers, dealt and grouped.

    Attributes:
        shards: Dataset indices of every local worker, in dealt order; unit `j` of a worker is
            `shard[j * unit_size : (j + 1) * unit_size]`.
        num_samples: Examples every worker visits in an epoch, padding included.
        dealt_in: The epoch whose permutation was dealt.
        dealt: That permutation of all examples.
    """

    num_examples: int
    world: World
    unit_size: int
    num_samples: int
    seed: int
    dealt_in: int
    dealt: IntArray
    shards: tuple[IntArray, ...]

    @property
    def num_slots(self) -> int:
        """Rows a worker delivers in an epoch: its visited units, and what is left over."""
        return -(-self.num_samples // self.unit_size)

    def num_units(self, worker: int) -> int:
        """How many units the order of `worker` permutes."""
        return _shard_length(self.num_examples, self.world.size, worker) // self.unit_size

    def num_visited(self, worker: int) -> int:
        """How many of them an epoch visits whole: fewer than `num_units` only where `drop_last` cuts the epoch."""
        return min(self.num_units(worker), self.num_samples // self.unit_size)

    def visits(self, workers: range) -> IntArray:
        """`num_visited` of each of the workers."""
        return np.array([self.num_visited(worker) for worker in workers])

    def padding(self, epoch: int) -> list[IntArray]:
        """Examples each local worker repeats at the end of `epoch`: the first dealt, in later epochs random ones."""
        size = self.world.size
        length = max(0, self.num_samples * size - self.num_examples)
        if epoch == self.dealt_in:
            repeated = self.dealt[np.arange(length) % self.num_examples]
        else:
            repeated = generator(self.seed, epoch, "padding").integers(self.num_examples, size=length)
        # Position `num_examples + i` of the padded list falls to worker `(num_examples + i) mod size`.
        worker_of = (self.num_examples + np.arange(length)) % size
        return [repeated[worker_of == worker] for worker in self.world.local_workers]

    def group(self, local: int) -> IntArray:
        """The units of local worker number `local` as `units x unit_size` dataset indices."""
        shard = self.shards[local]
        return shard[: len(shard) - len(shard) % self.unit_size].reshape(-1, self.unit_size)

    def unit_of(self, local: int, examples: IntArray) -> IntArray:
        """The unit of local worker number `local` that each of the examples belongs to, or -1."""
        owner_N, unit_N = self._maps
        return np.where(owner_N[examples] == local, unit_N[examples], -1)

    @functools.cached_property
    def _maps(self) -> tuple[npt.NDArray[np.int32], IntArray]:
        """For every dataset index the local worker and the unit it belongs to, or -1."""
        owner_N, unit_N = np.full(self.num_examples, -1, dtype=np.int32), np.full(self.num_examples, -1)
        for local in range(len(self.shards)):
            grouped = self.group(local)
            owner_N[grouped] = local
            unit_N[grouped] = np.arange(len(grouped))[:, None]
        return owner_N, unit_N

    def examples(self, local: int, order: IntArray, padding: IntArray) -> IntArray:
        """Dataset indices local worker number `local` visits when its units come in `order`, cut to `num_samples`."""
        grouped = self.group(local)
        rest = self.shards[local][grouped.size :]
        return np.concatenate([grouped[order].reshape(-1), rest, padding])[: self.num_samples]


def deal(
    num_examples: int,
    world: World,
    *,
    unit_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    whole_batches: int | None = None,
    shuffle: bool = True,
) -> Units:
    """Deal `num_examples` examples among the workers, index for index as `DistributedSampler` does in `epoch`.

    With `whole_batches` every worker visits the largest multiple of that number for which no padding is needed.
    """
    if shuffle:
        # On the CPU whatever the default device, as DistributedSampler's own generator is.
        random = torch.Generator("cpu").manual_seed(seed + epoch)
        dealt = torch.randperm(num_examples, generator=random, device="cpu").numpy()
    else:
        dealt = np.arange(num_examples)
    num_samples = math.ceil(num_examples / world.size)
    if whole_batches is not None:
        num_samples = num_examples // world.size // whole_batches * whole_batches
        if num_samples == 0:
            raise ValueError(
                f"{num_examples} examples do not fill one batch of {whole_batches} on each of {world.size} workers, so "
                "drop_last=True leaves none; use drop_last=False, a smaller batch or fewer workers"
            )
    shards = tuple(dealt[worker :: world.size] for worker in world.local_workers)
    return Units(num_examples, world, unit_size, num_samples, seed, epoch, dealt, shards)


def generator(seed: int, *stream: int | str) -> np.random.Generator:
    """A random generator for one purpose: the same for the same `seed` and `stream`, independent of all others."""
    words = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in stream]
    return np.random.default_rng([seed, *words])


def _shard_length(num_examples: int, size: int, worker: int) -> int:
    return (num_examples - worker + size - 1) // size

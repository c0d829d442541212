"""The state of a process out of those of all processes that saved, however many they were.

All processes together visit one sequence of examples: process `k` of `W` visits every `W`-th, from the `k`-th on. With
single examples and the same global batch that sequence says all, since lanes do not depend on the number of processes.
Otherwise the sequence is dealt anew. Within an epoch, units that have a sign come first: visits of plus units and of
minus units, so that the signs still decide where their examples stand in the next epoch. What is left of the epoch
follows. What has been visited and has no place among the visits comes last, and is not visited again in this epoch.

Shapes: `W` processes that saved, `L` lanes of them, `J` lanes of each; `V` visits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from cdgrab.fields import Fields, damaged
from cdgrab.lanes import IntArray, Lanes, narrowest, samples_each
from cdgrab.orders import Balanced, Herded
from cdgrab.progress import Progress
from cdgrab.settings import Settings
from cdgrab.world import World
from cdgrab.world_sorter import WorldSorter

LAYOUT = ("world_size", "batch_size", "unit_size", "lanes")


@dataclass(frozen=True)
class Saved:
    """A state of all processes, or of some.

    Attributes:
        settings: Those of an ordering in the process that saved first.
        epoch: The epoch of the state.
        parts: The states of processes, by rank.
    """

    settings: Settings
    epoch: int
    parts: dict[int, Fields]

    @classmethod
    def of(cls, content: Fields, settings: Settings) -> Saved:
        """What was saved by orderings with these settings, but for the layout."""
        size, batch, unit, lanes = (content.inside("layout").whole(key, least=1, most=1 << 40) for key in LAYOUT)
        parts = content.inside("parts")
        found = {rank: parts.inside(rank) for rank in parts.values}
        if not found or any(type(rank) is not int or not 0 <= rank < size for rank in found) or lanes % size:
            raise damaged(f"layout and parts are not those of {size} processes with {lanes} lanes")
        if 0 in found:
            for part in found.values():
                if part.values.get("sorter", {}) is None:  # the same on all ranks
                    part.values["sorter"] = found[0].raw("sorter")
        made = replace(settings, world=World(0, size), batch_size=batch, unit_size=unit, lanes=lanes)
        return cls(made, content.whole("epoch"), found)

    @property
    def layout(self) -> tuple[int, ...]:
        return layout_of(self.settings)


class Dealt(NamedTuple):
    """A sequence of all examples, dealt to new lanes within an epoch or between two.

    Attributes:
        examples: The sequence.
        signs: For every visit so far the sign of all its units.
        left: The number of examples left of the epoch, which come after those visits.
    """

    examples: IntArray
    signs: list[int]
    left: int


def layout_of(settings: Settings) -> tuple[int, ...]:
    """How examples are dealt: the values of `LAYOUT`."""
    return settings.world.size, settings.batch_size, settings.unit_size, settings.lanes


def part_for(settings: Settings, saved: Saved, dealt: Lanes, fresh: Any, form: str) -> tuple[Fields, str | None]:
    """The state of this process, and a line to log if the examples were dealt anew.

    Args:
        settings: Those of this process.
        saved: What was saved.
        dealt: Lanes of this process in that epoch.
        fresh: The state of a sorter for them at the start of the epoch, or None.
        form: The form of its rows.
    """
    rank, size = settings.world.rank, settings.world.size
    if saved.layout == layout_of(settings) and rank in saved.parts:
        return saved.parts[rank], None
    if len(saved.parts) < saved.settings.world.size:
        raise ValueError(
            f"the state is that of rank {', '.join(map(str, saved.parts))} of {saved.settings.world.size}, and this is "
            f"rank {rank} of {size}; every rank must load its own, or all of them one that state_dict() returned"
        )
    try:
        return _converted(settings, saved, dealt, fresh, form)
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise damaged(f"it cannot be dealt to {size} ranks ({error!r})") from error


def _converted(settings: Settings, saved: Saved, dealt: Lanes, fresh: Any, form: str) -> tuple[Fields, str | None]:
    rank, size, first = settings.world.rank, settings.world.size, saved.parts[0]
    ranks = [_rank_of(saved, other, dealt) for other in range(saved.settings.world.size)]
    sorter = WorldSorter.of(saved.settings, [saved.parts[other] for other in range(len(ranks))])
    progress, line = _same_lanes(settings, saved, ranks), None
    if progress is not None:
        examples, samples = _interleaved([lanes.shard for lanes, _ in ranks]), dealt.num_samples
        state = fresh and sorter.for_lanes(fresh, settings)
    else:
        again = _dealt_anew(settings, ranks, sorter)
        examples, visits = again.examples, len(again.signs)
        before = visits * settings.lanes // size
        progress = {"rows": before, "named": False, "lines": torch.zeros(0, dealt.num_local, dtype=torch.int64)}
        samples = dealt.num_samples
        if visits or again.left < settings.num_examples:
            per_rank = math.ceil(again.left / size)
            if settings.drop_last:
                per_rank = max(1, again.left // size // settings.batch_size) * settings.batch_size
            samples = before * settings.unit_size + per_rank
        state = fresh and sorter.dealt_anew(fresh, settings, again.signs)
        line = (
            f"the state of {saved.settings.world.size} ranks with batches of {saved.settings.batch_size} is dealt "
            f"anew to {size} with batches of {settings.batch_size}; epoch {saved.epoch} has {again.left} examples left"
        )
    kind = first.raw("kind")
    values = {
        **first.values,
        "form": form if form.startswith(f"{kind} ") else first.raw("form"),
        "dim": sorter.dim,
        "examples": torch.from_numpy(examples[rank::size].copy()),
        "samples": samples,
        "progress": progress,
        "sorter": state or {},
    }
    return Fields(values, "parts"), line


def _rank_of(saved: Saved, rank: int, dealt: Lanes) -> tuple[Lanes, Progress]:
    """The lanes of a process that saved, and its progress in them."""
    part, settings = saved.parts[rank], saved.settings
    world = World(rank, settings.world.size)
    count = len(range(rank, settings.num_examples, world.size))
    lanes = replace(
        dealt,
        world=world,
        num_lanes=settings.lanes,
        unit_size=settings.unit_size,
        shard=part.integers("examples", count, least=0, end=settings.num_examples).numpy(),
        num_samples=part.whole("samples", least=1, most=samples_each(settings.num_examples, world)),
    )
    progress = Progress(lanes, saved.epoch, np.arange(lanes.num_units, dtype=narrowest(lanes.num_units)))
    progress.load_state_dict(part.inside("progress"))
    return lanes, progress


def _interleaved(parts: list[IntArray]) -> IntArray:
    """One sequence of which part `k` of `W` is every `W`-th element, from the `k`-th on."""
    place = np.concatenate([np.arange(len(part)) * len(parts) + number for number, part in enumerate(parts)])
    found: IntArray = np.concatenate(parts)[np.argsort(place, kind="stable")]
    return found


def _same_lanes(settings: Settings, saved: Saved, ranks: list[tuple[Lanes, Progress]]) -> dict[str, Any] | None:
    """The progress of this process if lanes are the same, and all processes have come equally far; else None."""
    before, size, rank = saved.settings, settings.world.size, settings.world.rank
    same = before.lanes == settings.lanes and before.unit_size == settings.unit_size == 1
    same &= before.world.size * before.batch_size == size * settings.batch_size
    states = [progress.state_dict() for _, progress in ranks]
    rows = sum(state["rows"] for state in states)
    visits = {progress.visits for _, progress in ranks}
    whole = all(lanes.num_samples == samples_of(before, lanes.world) for lanes, _ in ranks)
    if not same or not whole or len(visits) > 1 or rows % size or len({state["named"] for state in states}) > 1:
        return None
    lines = torch.zeros(0, settings.lanes // size, dtype=torch.int64)
    if states[0]["named"]:
        places = [torch.where(s["lines"] < 0, -1, s["lines"].long() * len(ranks) + k) for k, s in enumerate(states)]
        places_VL = torch.stack(places, dim=2).flatten(1, 2)
        counts = {int((places_VL[:, other::size] >= 0).sum()) for other in range(size)}
        if counts != {rows // size}:
            return None
        mine_VJ = places_VL[:, rank::size]
        lines = torch.where(mine_VJ < 0, -1, (mine_VJ - rank) // size)
    return {"rows": rows // size, "named": states[0]["named"], "lines": lines}


def samples_of(settings: Settings, world: World) -> int:
    """The number of examples that a process visits in a whole epoch."""
    return samples_each(settings.num_examples, world, settings.batch_size if settings.drop_last else None)


def _dealt_anew(settings: Settings, ranks: list[tuple[Lanes, Progress]], sorter: WorldSorter) -> Dealt:
    if not any(progress.rows for _, progress in ranks):
        return Dealt(_interleaved([lanes.shard for lanes, _ in ranks]), [], settings.num_examples)
    if isinstance(settings.spec, Herded):
        raise ValueError(
            "the state was taken within an epoch of 'greedy-herding' with another global batch, and its rows fit only "
            "the same one; load a state taken between epochs"
        )
    signs_VL = sorter.unit_signs()
    examples, signs, places = [], [], []
    for number, (lanes, progress) in enumerate(ranks):
        units_VJ = progress.by_visit()[: progress.visits]
        signs_VJ = np.zeros(units_VJ.shape, dtype=np.int8)
        known = signs_VL[: len(units_VJ), number :: len(ranks)]
        signs_VJ[: len(known)] = known
        visit, lane = np.nonzero(units_VJ >= 0)
        count = visit * settings.num_examples + lane * len(ranks) + number
        if not len(progress.state_dict()["lines"]):  # in planned order: the last visit may have begun
            visit_first = visit * lanes.num_local + lane < progress.rows
            visit, lane, count = visit[visit_first], lane[visit_first], count[visit_first]
        found_nu = lanes.units_Nu[units_VJ[visit, lane]]
        examples.append(found_nu.reshape(-1))
        signs.append(np.repeat(signs_VJ[visit, lane], lanes.unit_size))
        places.append(np.repeat(count, lanes.unit_size))
    in_order = np.argsort(np.concatenate(places), kind="stable")
    visited, sign = np.concatenate(examples)[in_order], np.concatenate(signs)[in_order]
    left = _interleaved_left(settings.num_examples, visited, ranks)
    return _in_lines(settings, visited, sign, left)


def _interleaved_left(num_examples: int, visited: IntArray, ranks: list[tuple[Lanes, Progress]]) -> IntArray:
    """The examples left of the epoch, without padding, in the order in which all processes would visit them."""
    is_left = np.ones(num_examples, dtype=bool)
    is_left[visited] = False
    parts, places = [], []
    for number, (_, progress) in enumerate(ranks):
        mine = progress.remaining()
        parts.append(mine)
        places.append(np.arange(len(mine)) * len(ranks) + number)
    sequence = np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]
    sequence = sequence[is_left[sequence]]
    first = np.sort(np.unique(sequence, return_index=True)[1])
    found: IntArray = sequence[first]
    return found


def _in_lines(settings: Settings, visited: IntArray, sign: IntArray, left: IntArray) -> Dealt:
    """Visits of examples that have one sign, what is left, and what has been visited besides."""
    width, total = settings.lanes * settings.unit_size, settings.num_examples
    plus, minus = visited[sign > 0], visited[sign < 0]
    if isinstance(settings.spec, Balanced):
        paired = settings.balances_pairs
        lines = [(plus[i : i + width], 1) for i in range(0, len(plus) - width + 1, width)]
        others = [(minus[i : i + width], -1) for i in range(0, len(minus) - width + 1, width)]
        lines = [line for pair in zip(lines, others, strict=False) for line in pair] if paired else lines + others
    else:
        paired = False
        lines = [(visited[i : i + width], 0) for i in range(0, len(visited) - width + 1, width)]
    if settings.drop_last:  # a whole batch must be left
        fitting = (total - settings.world.size * settings.batch_size) // width
        lines = lines[: fitting // 2 * 2 if paired else fitting]
    grid = np.concatenate([np.zeros(0, dtype=visited.dtype), *(line for line, _ in lines)])
    rest = np.ones(total, dtype=bool)
    rest[grid] = rest[left] = False
    tail = np.concatenate([visited[rest[visited]], np.flatnonzero(rest & ~np.isin(np.arange(total), visited))])
    examples = np.concatenate([grid, left, tail]).astype(narrowest(total))
    return Dealt(examples, [one for _, one in lines], len(left))

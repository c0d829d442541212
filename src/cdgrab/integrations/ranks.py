"""The state of an ordering on all ranks as one dict, for tools in which one rank writes the checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cdgrab.ordering import Ordering


class AllRanks:
    """Saves and loads the state of an ordering on all ranks. All of them call `state_dict`; one may write the result.

    Example:
        >>> from cdgrab import Ordering
        >>> ordering = Ordering(8, batch_size=2)
        >>> len(AllRanks(ordering).state_dict()["ranks"])
        1
    """

    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks: the same dict on each of them."""
        mine = (self.ordering.world.rank, self.ordering.state_dict())
        found = [mine]
        if self.ordering.world.size > 1:
            found = [mine] * dist.get_world_size()
            dist.all_gather_object(found, mine)
        return {"ranks": dict(found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. A state that does not fit raises `ValueError` and changes nothing."""
        ranks, world = state.get("ranks", {}), self.ordering.world
        if len(ranks) != world.size:
            raise ValueError(
                f"the checkpoint has the order of {len(ranks)} ranks, and there are {world.size}; resume on as many"
            )
        self.ordering.load_state_dict(ranks[world.rank])


__all__ = ["AllRanks"]

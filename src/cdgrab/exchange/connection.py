"""Chooses the exchange of an ordering and owns its process group."""

from __future__ import annotations

import torch.distributed as dist

from cdgrab.exchange import EXCHANGES, Exchange, ExchangeMaker, Local, find_exchange
from cdgrab.exchange.collectives import own_group
from cdgrab.settings import Settings


class Connection:
    """The exchange in use. It may change between whole rows and sketches.

    Args:
        settings: The settings of the ordering.
        exchange: The user's choice, or None.

    Attributes:
        exchange: The exchange in use.
        group: The ranks, in a group of its own if they exchange rows.
    """

    def __init__(self, settings: Settings, exchange: str | ExchangeMaker | None) -> None:
        self._default = "sharded" if settings.balances_pairs else "gather"
        self._by_default = exchange is None
        maker = find_exchange(exchange or self._default)
        exchanges = settings.coordinated and settings.ranks_meet
        self.group = own_group(settings.group) if exchanges else settings.group
        self.exchange: Exchange = maker(self.group) if exchanges else Local()
        _check(settings, maker if not exchanges and isinstance(maker, type) else self.exchange)

    def use_for(self, *, sketched: bool) -> None:
        """Switch to the exchange for sketches, or for whole rows. Starts no collective.

        Without a choice of the user's, sketches are gathered, because they are short.
        """
        current = self.exchange
        if current.name is None:
            return
        if not self._by_default:
            if sketched and not current.takes_sketches:
                raise ValueError(
                    f"exchange {current.name!r} is for whole rows, and sketches are short; leave exchange= out, or "
                    "make the ordering with 'gather'"
                )
            return
        name = "gather" if sketched else self._default
        if current.name != name:
            self.exchange = EXCHANGES[name](self.group)
            self.exchange.bytes_sent = current.bytes_sent

    def close(self) -> None:
        """Destroy the group, if it is its own, once no rank needs it any more.

        A group of some of the ranks stays: its name would be given to the next one (`own_group`).
        """
        if self.exchange.name is not None and dist.is_initialized():
            dist.barrier(self.group)
            if dist.get_world_size(self.group) == dist.get_world_size():
                dist.destroy_process_group(self.group)


def _check(settings: Settings, exchange: Exchange | type) -> None:
    """Raise `ValueError` if the exchange, or its class, cannot serve the order."""
    name, order = getattr(exchange, "name", None), settings.order
    if getattr(exchange, "pairs_only", False) and settings.coordinated and not settings.balances_pairs:
        raise ValueError(f"exchange {name!r} balances pair differences, which order {order!r} does not; use 'gather'")
    if getattr(exchange, "shares_signs", False) and not settings.decides_signs and settings.spec.needs_gradients:
        raise ValueError(f"exchange {name!r} sends signs, but order {order!r} has none; use 'gather'")

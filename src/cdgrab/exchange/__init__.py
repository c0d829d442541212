"""How rows of different ranks come together. Swapping an exchange changes cost, never results (`sketch` aside)."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from cdgrab.exchange.base import Exchange
from cdgrab.exchange.gather import Gather
from cdgrab.exchange.local import Local
from cdgrab.exchange.server import Server
from cdgrab.exchange.sharded import Sharded, ShardedPairs
from cdgrab.exchange.sketch import Sketch

ExchangeMaker = Callable[[dist.ProcessGroup | None], Exchange]

EXCHANGES: dict[str, ExchangeMaker] = {"sharded": Sharded, "gather": Gather, "server": Server, "sketch": Sketch}


def find_exchange(exchange: str | ExchangeMaker) -> ExchangeMaker:
    """Look an exchange up by name. A callable that makes one from a process group is passed through."""
    if callable(exchange):
        return exchange
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}; choose one of {', '.join(EXCHANGES)}")
    return EXCHANGES[exchange]


def name_of(exchange: Exchange) -> str | None:
    """What it goes by in messages; None for rows that stay where they are."""
    if isinstance(exchange, Local):
        return None
    return next((name for name, maker in EXCHANGES.items() if maker is type(exchange)), "custom")


__all__ = [
    "EXCHANGES",
    "Exchange",
    "ExchangeMaker",
    "Gather",
    "Local",
    "Server",
    "Sharded",
    "ShardedPairs",
    "Sketch",
    "find_exchange",
    "name_of",
]

"""How rows of different ranks come together. Swapping an exchange changes cost, never results."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from cdgrab.exchange.base import Exchange
from cdgrab.exchange.gather import Gather
from cdgrab.exchange.local import Local
from cdgrab.exchange.server import Server
from cdgrab.exchange.sharded import Sharded, ShardedPairs

ExchangeMaker = Callable[[dist.ProcessGroup | None], Exchange]

EXCHANGES: dict[str, ExchangeMaker] = {"sharded": Sharded, "gather": Gather, "server": Server}


def find_exchange(exchange: str | ExchangeMaker) -> ExchangeMaker:
    """Look an exchange up by name. A callable that makes one from a process group is passed through."""
    if callable(exchange):
        return exchange
    if exchange == "sketch":
        raise ValueError(
            "exchange 'sketch' is gone: 'sharded' is exact at the price of an all-reduce, and attach(model, "
            "source='sketch') makes short rows of single examples"
        )
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}; choose one of {', '.join(EXCHANGES)}")
    return EXCHANGES[exchange]


__all__ = [
    "EXCHANGES",
    "Exchange",
    "ExchangeMaker",
    "Gather",
    "Local",
    "Server",
    "Sharded",
    "ShardedPairs",
    "find_exchange",
]

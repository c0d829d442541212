"""Exchanges bring the rows of all ranks together. Swapping one for another changes cost, never results."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from cdgrab.exchange.base import Exchange
from cdgrab.exchange.gather import Gather
from cdgrab.exchange.local import Local
from cdgrab.exchange.server import Server
from cdgrab.exchange.sharded import Sharded, ShardedPairs

ExchangeMaker = Callable[[dist.ProcessGroup | None], Exchange]
"""A function that makes an exchange from a process group; `Ordering(exchange=...)` takes one."""

EXCHANGES: dict[str, ExchangeMaker] = {"sharded": Sharded, "gather": Gather, "server": Server}
"""The exchanges by name."""


def find_exchange(exchange: str | ExchangeMaker) -> ExchangeMaker:
    """The function that makes an exchange, by the exchange's name. A function is passed through."""
    if callable(exchange):
        return exchange
    if exchange == "sketch":
        raise ValueError(
            "exchange 'sketch' is gone: use 'sharded', which is exact at the price of an all-reduce, or "
            "attach(model, source='sketch') for short rows of single examples"
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

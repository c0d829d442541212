"""How rows of different workers come together. Swapping an exchange changes cost, never results."""

from cdgrab.exchange.base import BoolArray, Exchange
from cdgrab.exchange.gather import Gather
from cdgrab.exchange.local import Local

__all__ = ["BoolArray", "Exchange", "Gather", "Local"]

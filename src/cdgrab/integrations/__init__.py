"""Balanced orders in the tools people train with: one module per tool, imported only when it is asked for.

This package itself imports none of them. All are thin layers on `cdgrab.ordered`.
"""

from cdgrab.integrations.figures import log

__all__ = ["log"]

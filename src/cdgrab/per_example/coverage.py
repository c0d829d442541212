"""Which trained parameters take part in ordering, and which are left out, with the reason.

Balancing on most of the parameters is nearly as good as on all of them, so a parameter whose gradients of single
examples cannot be seen does not stop a run. It is left out, and one warning says so.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping

log = logging.getLogger("cdgrab")

_MOST_NAMES = 4  # of a reason, in a message


class NothingToBalance(ValueError):
    """No trained parameter shows the gradients of single examples."""


class Coverage:
    """The trained parameters of a model, less those that are left out.

    Args:
        sizes: Numbers of each trained parameter, by name.
        left_out: Reasons known before training begins, by name.
        strict: Whether leaving something out is an error.
    """

    def __init__(self, sizes: Mapping[str, int], left_out: Mapping[str, str], *, strict: bool) -> None:
        self._sizes, self._strict = sizes, strict
        self._said = 0  # parameters of which the log has heard
        self.left_out: dict[str, str] = {}
        for name, reason in left_out.items():
            self.leave_out([name], reason)

    @property
    def share(self) -> float:
        """The share of the trained numbers that is balanced."""
        total = sum(self._sizes.values())
        return 1 - sum(self._sizes[name] for name in self.left_out) / total if total else 0.0

    def leave_out(self, names: Collection[str], reason: str) -> None:
        """Leave parameters out from now on; raises `ValueError` if that is not allowed or nothing remains."""
        new = [name for name in names if name not in self.left_out]
        if new and self._strict:
            raise ValueError(f"strict=True, and {_listed(new)} cannot be balanced: {reason}")
        self.left_out |= dict.fromkeys(new, reason)
        if len(self.left_out) == len(self._sizes):
            raise NothingToBalance(f"no trained parameter can be balanced; use source='batch'\n{self.reasons()}")

    def say(self) -> None:
        """Log what has been left out since the last time."""
        if len(self.left_out) > self._said:
            self._said = len(self.left_out)
            log.warning("%.1f %% of the trained numbers are balanced.\n%s", 100 * self.share, self.reasons())

    def reasons(self) -> str:
        """One line for each reason: which parameters are left out."""
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.left_out.items():
            by_reason[reason].append(name)
        return "\n".join(f"  left out: {_listed(names)}: {reason}" for reason, names in by_reason.items())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more

"""Where gradients are taken from a model on their way to the average. The only files that know a wrapper."""

from __future__ import annotations

from typing import Protocol


class Attachment(Protocol):
    """What `Ordering.attach` leaves behind."""

    def settle(self) -> None:
        """Wait until everything handed over has been dealt with; raise what went wrong meanwhile."""

    def detach(self) -> None:
        """Leave the model as it would be without ordering."""

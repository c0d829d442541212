"""Short rows of several steps, observed together: on a GPU an observation takes as long as a good part of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering


class HeldRows:
    """Rows of whole batches, held until they are as many as are balanced at a time."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._held_SND: Tensor | None = None
        self.steps = 0  # that are held

    def add(self, rows_ND: Tensor) -> None:
        """Hold the rows of a batch, or observe them, with all that are held; nothing is kept by reference."""
        held_SND = self._held_SND
        like = None if held_SND is None else (held_SND.shape[1:], held_SND.dtype, held_SND.device)
        if held_SND is None or like != (rows_ND.shape, rows_ND.dtype, rows_ND.device):
            self.observe()
            steps = self._ordering._steps_together(rows_ND)
            if steps < 2 or len(rows_ND) < self._ordering.batch_size:  # alone, or the last of an epoch
                self._ordering._observe(rows_ND)
                return
            held_SND = self._held_SND = rows_ND.new_empty(steps, *rows_ND.shape)
        held_SND[self.steps].copy_(rows_ND)
        self.steps += 1
        if self.steps == len(held_SND) or self._ordering._examples_due() <= 0:
            self.observe()

    def observe(self) -> None:
        """What is held."""
        steps, self.steps = self.steps, 0
        if steps and self._held_SND is not None:
            self._ordering._observe(self._held_SND[:steps])

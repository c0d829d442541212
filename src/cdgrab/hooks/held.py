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
        self._places: list[Tensor] = []  # in it, of each step
        self._last_ND: Tensor | None = None  # what came last is often what comes next, with other numbers
        self.steps = 0  # that are held
        self._due = 0  # as many as are observed

    def add(self, rows_ND: Tensor) -> None:
        """Hold the rows of a batch, or observe them, with all that are held; they may change afterwards."""
        if rows_ND is not self._last_ND and not self._makes_room(rows_ND):
            self._ordering._observe(rows_ND)
            return
        if self.steps == 0:
            self._due = min(len(self._places), self._ordering._batches_left)
        self._places[self.steps].copy_(rows_ND)
        self.steps += 1
        if self.steps == self._due:
            self.observe()

    def observe(self) -> None:
        """What is held."""
        steps, self.steps = self.steps, 0
        if steps and self._held_SND is not None:
            self._ordering._observe(self._held_SND[:steps])

    def _makes_room(self, rows_ND: Tensor) -> bool:
        """For rows like these; if there are others, they are observed. Those of the last batch may be fewer."""
        held_SND = self._held_SND
        like = None if held_SND is None else (held_SND.shape[1:], held_SND.dtype, held_SND.device)
        if like != (rows_ND.shape, rows_ND.dtype, rows_ND.device):
            self.observe()
            steps = self._ordering._steps_together(rows_ND)
            if steps < 2 or len(rows_ND) < self._ordering.batch_size:
                return False
            self._held_SND = rows_ND.new_empty(steps, *rows_ND.shape)
            self._places = list(self._held_SND.unbind())
        self._last_ND = rows_ND
        return True

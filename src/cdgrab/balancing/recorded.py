"""`tables.balance_blocks`, recorded: short rows wait in a place of their own, so it is the same launches every time.

Only short rows, and where there is one running sum: of long ones the tables take many megabytes, and a recording keeps
them.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdgrab.balancing import tables
from cdgrab.balancing.rules import Greedy, Rule
from cdgrab.graphs import recording

log = logging.getLogger("cdgrab")

LONG_ROW = 1 << 15  # from here on rows gain nothing by waiting
_MOST_RECORDED = 8  # at a time; the oldest go
_MOST_RECORDINGS = 64  # in all: where there is no end to them, rows lie elsewhere every time
_MOST_KNOWN = 64


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    decided_4N: Tensor
    thresholds_N: Tensor  # which the graph reads


class RecordedBlocks:
    """Balances rows that come to lie where others lay before with what was recorded then."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._recorded: dict[Hashable, _Recorded] = {}
        self._left = _MOST_RECORDINGS
        self._pool: Any | None = None  # what a replay leaves is copied at once, so recordings may share their memory

    def __call__(self, rows_mLD: Tensor, minus_mLD: Tensor, running_sum_D: Tensor, rule: Rule) -> Tensor:
        """As `tables.balance_blocks`."""
        # Other rules draw thresholds; and somebody may be recording a step with all of this in it.
        short = rows_mLD.shape[2] < LONG_ROW
        if not (short and type(rule) is Greedy) or torch.cuda.is_current_stream_capturing():
            return tables.balance_blocks(rows_mLD, minus_mLD, running_sum_D, rule)
        place = (rows_mLD.data_ptr(), minus_mLD.data_ptr(), running_sum_D.data_ptr())
        key = (place, rows_mLD.shape, rows_mLD.stride(), minus_mLD.stride(), rows_mLD.device)
        recorded = self._recorded.get(key)
        if recorded is None and key in self._known and self._left > 0:
            recorded = self._record(key, rows_mLD, minus_mLD, running_sum_D, rule)
        if recorded is None:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known.add(key)
            return tables.balance_blocks(rows_mLD, minus_mLD, running_sum_D, rule)
        recorded.graph.replay()
        return recorded.decided_4N.clone()

    def _record(
        self, key: Hashable, rows_mLD: Tensor, minus_mLD: Tensor, running_sum_D: Tensor, rule: Rule
    ) -> _Recorded | None:
        self._left -= 1
        graph = torch.cuda.CUDAGraph()
        thresholds_N = tables.thresholds(rows_mLD, minus_mLD, rule)
        try:
            with recording(graph, rows_mLD.device, self._pool):
                decided_4N = tables.balance_blocks(rows_mLD, minus_mLD, running_sum_D, rule)
        except RuntimeError as error:  # too little memory
            self._left = 0
            log.warning("balancing cannot be recorded as a CUDA graph, and is done without: %s", error)
            return None
        self._pool = graph.pool()
        if len(self._recorded) >= _MOST_RECORDED:
            del self._recorded[next(iter(self._recorded))]  # now: recording has waited for its last replay
        self._recorded[key] = _Recorded(graph, decided_4N, thresholds_N)
        return self._recorded[key]

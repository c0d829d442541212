"""One running sum, and the fastest way to decide signs on the device of the rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing import tables
from cdgrab.balancing.rules import Rule, load_rule, thresholds_of
from cdgrab.balancing.tables import Differences, balance
from cdgrab.balancing.tally import Tally, Witness
from cdgrab.fields import Fields
from cdgrab.orders.fill import SignArray

Signs = SignArray | Tensor


def block_size(rows_KD: Tensor) -> int:
    """The number of rows that share a table. A row costs `K * dim` operations in it, a table costs a call or two."""
    if rows_KD.is_cuda:
        dim = rows_KD.shape[1]
        return 64 if dim < tables.LONG_ON_GPU else 8 if dim < tables.HUGE_ON_GPU else 16
    return 64 if rows_KD.shape[1] <= 2048 else 32


@dataclass
class Balancer:
    """One running sum: takes rows in balancing order, returns their signs.

    A row is finite if its squared length is. A row that is not finite gets the sign `+1`, so its pair keeps its order;
    it does not enter the running sum.
    """

    rule: Rule
    running_sum: Tensor = field(default_factory=lambda: torch.zeros(0))
    tally: Tally = field(default_factory=Tally)
    scratch: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    watched: int = 0  # the last so many numbers of a row are witnesses
    witness: Witness = field(default_factory=Witness)

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        """Reset the running sum to zero."""
        self.running_sum.zero_()
        self.tally, self.witness = Tally(), Witness()
        self.rule.start_epoch(epoch, num_rows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "running_sum": self.running_sum.clone(),
            "tally": asdict(self.tally.settled()),
            "witness": self.witness.state_dict(),
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: Fields, dim: int, dtype: torch.dtype) -> None:
        """Load the state of rows of `dim` numbers, witnesses among them; 0 if there has been none."""
        self.running_sum = state.tensor("running_sum", (0, max(0, dim - self.watched)), dtype=dtype)
        self.tally = Tally.loaded(state.inside("tally"))
        self.witness = Witness.loaded(state.inside("witness"), self.watched)
        load_rule(self.rule, state.inside("rule"))

    def balance(self, rows_KD: Tensor) -> Signs:
        """Decide the signs of the next rows (float32 or float64; nothing is kept by reference).

        For rows on a GPU the signs stay there as a float tensor: copying them would make the host wait.
        """
        if len(rows_KD) == 0:
            return np.empty(0, dtype=np.int8)
        zeros_KD = rows_KD.new_zeros(rows_KD.shape[1]).expand_as(rows_KD)
        return self.balance_visits(rows_KD[None], zeros_KD[None])

    def balance_visits(self, rows_pLD: Tensor, minus_pLD: Tensor) -> Signs:
        """Decide the `p * L` signs of the rows `rows - minus`, visit by visit, lane by lane."""
        rows, rows_witnesses = self._split_witnesses(rows_pLD)
        minus, minus_witnesses = self._split_witnesses(minus_pLD)
        if self.running_sum.numel() == 0:
            self.running_sum = torch.zeros(rows.shape[-1], dtype=rows.dtype, device=rows.device)
        signs = self._on_cpu(rows, minus) if rows.device.type == "cpu" else self._on_device(rows, minus)
        if self.watched:
            self.witness.add((rows_witnesses - minus_witnesses).flatten(0, 1), signs)
        return signs

    def _split_witnesses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that decide signs, and the witnesses."""
        end = rows.shape[-1] - self.watched
        return rows[..., :end], rows[..., end:]

    def _on_cpu(self, rows_pLD: Tensor, minus_pLD: Tensor) -> SignArray:
        if not compiled.available():
            signs_N = self._by_tables((rows_pLD - minus_pLD).flatten(0, 1), None)
            return signs_N.to(torch.int8).numpy()
        visits, lanes, dim = rows_pLD.shape
        thresholds_N = thresholds_of(
            self.rule,
            visits * lanes,
            lambda: compiled.lengths(rows_pLD.flatten(0, 1).numpy(), minus_pLD.flatten(0, 1).numpy()),
        )
        if self.scratch.shape[-1] != dim:  # kept between calls: allocating it costs more than filling it
            self.scratch = rows_pLD.new_zeros(2, dim)
        decided_4N = compiled.visit_signs(
            rows_pLD, minus_pLD, self.scratch.numpy(), self.running_sum.numpy(), thresholds_N
        )
        self.tally.add(decided_4N)
        signs: SignArray = decided_4N[0].astype(np.int8)
        return signs

    def _on_device(self, rows_pLD: Tensor, minus_pLD: Tensor) -> Tensor:
        if not tables.takes_blocks(rows_pLD, minus_pLD):
            return torch.cat([self._by_tables(*both) for both in zip(rows_pLD, minus_pLD, strict=True)])
        decided_4N = tables.balance_blocks(rows_pLD, minus_pLD, self.running_sum, self.rule)
        self.tally.add_decided(decided_4N)
        return decided_4N[0]

    def _by_tables(self, rows_KD: Tensor, minus_KD: Tensor | None) -> Tensor:
        size = block_size(rows_KD)
        minus = [None] * len(rows_KD) if minus_KD is None else minus_KD.split(size)
        batches = (Differences(*both) for both in zip(rows_KD.split(size), minus, strict=False))
        return torch.cat([balance(batch, self.running_sum, self.rule, self.tally)[0] for batch in batches])

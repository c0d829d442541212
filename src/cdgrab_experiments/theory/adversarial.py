"""Vectors made to hurt: which balancing copes with what.

A large common mean separates PairBalance, which never sees it, from MeanBalance, which must know it: of fixed vectors
it knows it from the second round on, of gradients, whose mean moves, it never does.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from cdgrab_experiments.theory import verdicts
from cdgrab_experiments.theory.report import Table
from cdgrab_experiments.theory.rounds import Shift, balance_rounds
from cdgrab_experiments.theory.settings import Herding
from cdgrab_experiments.theory.vectors import ADVERSARIAL, common_direction, unit_vectors
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

ORDERS = ("cd-grab", "pair", "id-grab", "rr")
PLAIN, FIXED, MOVING = "random directions", "with a common mean", "with a mean that moves"


def hard_cases(h: Herding, watch: Watch) -> tuple[Table, list[Verdict]]:
    """Balance every family with every order; bounds are told in lengths of the longest vector."""
    watch.begin("adversarial vectors", (len(ADVERSARIAL) + 3) * len(ORDERS))
    size = (h.hard_workers, h.hard_units, h.dim, h.seed)
    mean_D = h.hard_mean * common_direction(h.dim, h.seed)
    plain = unit_vectors(*size)
    cases: dict[str, tuple[Tensor, Shift | None]] = {
        PLAIN: (plain, None),
        FIXED: (plain, lambda _: mean_D),
        MOVING: (plain, lambda epoch: mean_D * h.hard_drift**epoch),
        **{name: (family(*size), None) for name, family in ADVERSARIAL.items()},
    }
    reached: dict[tuple[str, str], float] = {}
    permutations = True
    for name, (vectors_WUD, shift) in cases.items():
        longest = float(vectors_WUD.norm(dim=-1).max())
        for order in ORDERS:
            done = list(balance_rounds(vectors_WUD, order, "greedy", h.hard_rounds, h.seed, shift))
            reached[name, order] = float(np.mean([r.bound for r in done[-h.tail :]])) / longest
            expected = np.arange(h.hard_units)[None]
            permutations &= all(bool((np.sort(r.orders_WU, axis=1) == expected).all()) for r in done)
            watch.step(f"{name}, {order}")
    rows = [[name, *(f"{reached[name, order]:.3g}" for order in ORDERS)] for name in cases]
    title = f"Adversarial vectors: level of the bound, in lengths of the longest vector ({h.hard_workers} workers)"
    return Table(title, ["vectors", *ORDERS], rows), _judge(h, list(cases), reached, permutations)


def _judge(h: Herding, names: list[str], reached: dict[tuple[str, str], float], permutations: bool) -> list[Verdict]:
    found = [verdicts.within("every order is a permutation (1: yes)", float(permutations), 1, 1)]
    for name in names:
        ours, random = reached[name, "cd-grab"], reached[name, "rr"]
        if name == "identical rows":
            found.append(verdicts.within("`cd-grab`, identical rows: nothing to balance", ours, 0, 1e-3))
        else:
            limit = h.giant_share if name == "a few giants" else h.hard_share
            found.append(verdicts.at_most(f"`cd-grab` / `rr`, {name}", ours / random, limit))
    for name in (FIXED, MOVING):
        ratio = reached[name, "cd-grab"] / reached[PLAIN, "cd-grab"]
        found.append(verdicts.within(f"PairBalance does not care: {name} / without", ratio, *h.indifferent))
    ratio = reached[MOVING, "id-grab"] / reached[PLAIN, "id-grab"]
    found.append(verdicts.at_least(f"MeanBalance does: {MOVING} / without", ratio, h.harmed))
    return found

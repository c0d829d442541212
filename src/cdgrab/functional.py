"""Entry points for research: balance given vectors, without a model or a loader."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cdgrab.balancing.rules import RuleMaker, find_rule
from cdgrab.balancing.sorter import make_sorter
from cdgrab.lanes import generator
from cdgrab.orders import Free, find_order


def balance_vectors(
    vectors_WUD: Tensor,
    *,
    order: str = "cd-grab",
    rule: str | RuleMaker = "greedy",
    rounds: int = 1,
    seed: int = 0,
) -> Tensor:
    """Balance fixed vectors for some rounds and return the orders found.

    Each round visits the vectors in the order the round before found, as an epoch of training would with gradients that
    do not change. The first round visits them as they are stored.

    Args:
        vectors_WUD: `workers x units x dim`, on any device.
        order: A name in `cdgrab.ORDERS`.
        rule: How signs are decided; see `Ordering`.
        rounds: How often to go over the vectors.
        seed: Seed of everything random.

    Returns:
        `orders_WU`: for every worker a permutation of its units.

    Example:
        >>> from cdgrab import herding_bound
        >>> vectors = torch.randn(4, 100, 16, generator=torch.Generator().manual_seed(0))
        >>> orders = balance_vectors(vectors, rounds=5)
        >>> herding_bound(vectors, orders) < herding_bound(vectors) / 2
        True
    """
    if vectors_WUD.ndim != 3 or 0 in vectors_WUD.shape:
        raise ValueError(f"vectors have the shape {tuple(vectors_WUD.shape)}; expected workers x units x dim")
    num_workers, num_units, _ = vectors_WUD.shape
    vectors_WUD = vectors_WUD if vectors_WUD.dtype == torch.float64 else vectors_WUD.to(torch.float32)
    vectors_WUD = vectors_WUD.detach()
    spec, make_rule = find_order(order), find_rule(rule)
    if isinstance(spec, Free):
        last = [spec.baseline(num_units, seed, rounds, worker) for worker in range(num_workers)]
        return torch.from_numpy(np.stack(last))
    sorter = make_sorter(spec, [generator(seed, worker, "rule") for worker in range(num_workers)], make_rule)
    orders = [np.arange(num_units) for _ in range(num_workers)]
    nothing = np.arange(0)
    for epoch in range(rounds):
        sorter.start_epoch(epoch, np.full(num_workers, num_units))
        turns_UW = torch.from_numpy(np.stack(orders, axis=1)).to(vectors_WUD.device)
        workers = torch.arange(num_workers, device=vectors_WUD.device)
        for turns_mW in turns_UW.split(1024):
            sorter.add(vectors_WUD[workers, turns_mW])
        sorter.close()
        orders = [sorter.arrange(worker, visited, nothing) for worker, visited in enumerate(orders)]
    return torch.from_numpy(np.stack(orders))

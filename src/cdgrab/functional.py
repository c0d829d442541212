"""Entry points for research: balance given vectors, without a model or a loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from cdgrab.arguments import whole_number
from cdgrab.balancing.rules import RuleMaker, find_rule
from cdgrab.balancing.sorter import make_sorter
from cdgrab.lanes import generator
from cdgrab.orders import Free, find_order


def balance_vectors(
    vectors_LUD: Tensor,
    *,
    order: str = "cd-grab",
    rule: str | RuleMaker = "greedy",
    rounds: int = 1,
    seed: int = 0,
) -> Tensor:
    """Balance fixed vectors for some rounds and return the orders found.

    A round visits the vectors in the order that the round before found, like an epoch of training whose gradients do
    not change. The first round visits them as they are stored.

    Args:
        vectors_LUD: `lanes x units x dim`, on any device.
        order: A name in `cdgrab.ORDERS`.
        rule: How signs are decided; see `Ordering`.
        rounds: The number of passes over the vectors.
        seed: Seed of everything random.

    Returns:
        `orders_LU`: for every lane a permutation of its units.

    Example:
        >>> from cdgrab import herding_bound
        >>> vectors = torch.randn(4, 100, 16, generator=torch.Generator().manual_seed(0))
        >>> orders = balance_vectors(vectors, rounds=5)
        >>> herding_bound(vectors, orders) < herding_bound(vectors) / 2
        True
    """
    return deque(balance_rounds(vectors_LUD, order=order, rule=rule, rounds=rounds, seed=seed), maxlen=1).pop()


def balance_rounds(
    vectors_LUD: Tensor,
    *,
    order: str = "cd-grab",
    rule: str | RuleMaker = "greedy",
    rounds: int = 1,
    seed: int = 0,
    shift: Callable[[int], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Balance fixed vectors as `balance_vectors` does; yield the order before the first round, then after each.

    Args:
        vectors_LUD: `lanes x units x dim`, on any device.
        order: A name in `cdgrab.ORDERS`.
        rule: How signs are decided; see `Ordering`.
        rounds: The number of passes over the vectors.
        seed: Seed of everything random.
        shift: Returns a vector that is added to all others in a round: a mean that moves, as that of gradients does.
    """
    vectors_LUD = _checked(vectors_LUD)
    rounds, seed = whole_number("rounds", rounds, least=0), whole_number("seed", seed, least=0)
    num_lanes, num_units, _ = vectors_LUD.shape
    spec, make_rule = find_order(order), find_rule(rule)
    sorter = None
    if not isinstance(spec, Free):
        sorter = make_sorter(spec, [generator(seed, lane, "rule") for lane in range(num_lanes)], make_rule)
    units_UL = np.arange(num_units * num_lanes).reshape(num_units, num_lanes)  # numbered visit by visit
    lanes = torch.arange(num_lanes, device=vectors_LUD.device)
    yield torch.from_numpy(units_UL // num_lanes).T.contiguous()
    for epoch in range(rounds):
        if isinstance(spec, Free):
            drawn = [spec.baseline(num_units, seed, epoch + 1, lane) for lane in range(num_lanes)]
            units_UL = np.stack(drawn, axis=1) * num_lanes + np.arange(num_lanes)
        else:
            assert sorter is not None
            sorter.start_epoch(epoch, np.full(num_lanes, num_units))
            for visits_mL in torch.from_numpy(units_UL // num_lanes).to(vectors_LUD.device).split(1024):
                rows_mLD = vectors_LUD[lanes, visits_mL]
                sorter.add(rows_mLD if shift is None else rows_mLD + shift(epoch))
            sorter.close()
            units_UL = sorter.arrange(units_UL, slice(None)).reshape(num_units, num_lanes)
        yield torch.from_numpy(units_UL // num_lanes).T.contiguous()


def _checked(vectors_LUD: Tensor) -> Tensor:
    """The vectors, detached and at least in single precision; raises `ValueError` if they cannot be balanced."""
    if not isinstance(vectors_LUD, Tensor):
        raise ValueError(f"vectors are a {type(vectors_LUD).__name__}; pass a tensor, lanes x units x dim")
    if vectors_LUD.ndim != 3 or 0 in vectors_LUD.shape:
        raise ValueError(f"vectors have the shape {tuple(vectors_LUD.shape)}; expected lanes x units x dim")
    if vectors_LUD.is_complex():
        raise ValueError(f"vectors have the type {vectors_LUD.dtype}; expected real numbers")
    return vectors_LUD.detach().to(torch.promote_types(vectors_LUD.dtype, torch.float32))

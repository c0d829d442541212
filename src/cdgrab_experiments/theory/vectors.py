"""Vectors to balance: the paper's, and some that were made to hurt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

Family = Callable[[int, int, int, int], Tensor]


def unit_vectors(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """The paper's set-up: random directions of length one, centred per worker."""
    vectors_WUD = _directions(workers, units, dim, _rng(seed))
    return vectors_WUD - vectors_WUD.mean(1, keepdim=True)


def low_rank(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """Two directions hold everything."""
    rng = _rng(seed)
    return torch.randn(workers, units, 2, generator=rng) @ normalize(torch.randn(2, dim, generator=rng))


def heavy_tails(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """Lengths from Student's t with 3 degrees of freedom: their variance exists, nothing beyond it does."""
    rng = _rng(seed)
    directions_WUD = _directions(workers, units, dim, rng)
    normal = torch.randn(workers, units, 4, generator=rng)
    return directions_WUD * normal[..., :1] / normal[..., 1:].square().mean(-1, keepdim=True).sqrt()


def few_giants(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """Lengths `exp(3 * normal)`: a handful of vectors outweigh all others together."""
    rng = _rng(seed)
    return _directions(workers, units, dim, rng) * torch.randn(workers, units, 1, generator=rng).mul(3).exp()


def identical(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """One vector, over and over: there is nothing to balance, and nothing may break."""
    return _directions(1, 1, dim, _rng(seed)).expand(workers, units, dim).contiguous()


def one_dominates(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """The vectors of worker 0 are a thousand times as long."""
    scale_W = torch.ones(workers)
    scale_W[0] = 1000.0
    return unit_vectors(workers, units, dim, seed) * scale_W[:, None, None]


def common_direction(dim: int, seed: int) -> Tensor:
    """A direction for a common mean."""
    return normalize(torch.randn(dim, generator=_rng(seed + 1)), dim=0)


ADVERSARIAL: dict[str, Family] = {
    "low rank": low_rank,
    "heavy tails": heavy_tails,
    "a few giants": few_giants,
    "identical rows": identical,
    "one dominating worker": one_dominates,
}


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _directions(workers: int, units: int, dim: int, rng: torch.Generator) -> Tensor:
    return normalize(torch.randn(workers * units, dim, generator=rng)).view(workers, units, dim)

"""Sums of outer products, each side shortened: what sketches are made of."""

from __future__ import annotations

from torch import Tensor

from cdgrab.balance.tables import has_kernels

MOST_DIRECTIONS = 64  # of a side that Triton's kernel takes


def outer_sums(b_NTq: Tensor, left_mq: Tensor | None, a_NTp: Tensor, right_kp: Tensor | None) -> Tensor:
    """`N x m x k`: `sum_t outer(left @ b_t, right @ a_t)`. Without a projection a side is taken as it is."""
    widths = (
        vectors.shape[2] if projection is None else len(projection)
        for vectors, projection in ((b_NTq, left_mq), (a_NTp, right_kp))
    )
    if has_kernels(b_NTq, a_NTp) and max(widths) <= MOST_DIRECTIONS and a_NTp.numel() and b_NTq.numel():
        from cdgrab.ghost import kernels

        return kernels.outer_sums(b_NTq, left_mq, a_NTp, right_kp)
    return _across(b_NTq, left_mq) @ _across(a_NTp, right_kp).mT


def _across(vectors_NTp: Tensor, projection_kp: Tensor | None) -> Tensor:
    """`N x k x T`: as `shortened`, in whichever way nothing has to be copied."""
    if projection_kp is None:
        return vectors_NTp.mT
    if vectors_NTp.stride(2) == 1:
        return (vectors_NTp @ projection_kp.T).mT
    return projection_kp @ vectors_NTp.mT


def shortened(vectors_NTp: Tensor, projection_kp: Tensor | None) -> Tensor:
    """`N x T x k`: every vector, projected."""
    if projection_kp is None:
        return vectors_NTp
    if not has_kernels(vectors_NTp) or len(projection_kp) > MOST_DIRECTIONS:
        return vectors_NTp @ projection_kp.T
    num, positions, _ = vectors_NTp.shape
    alone = vectors_NTp.reshape(num * positions, 1, -1)
    ones = vectors_NTp.new_ones(1, 1, 1).expand(len(alone), 1, 1)
    return outer_sums(ones, None, alone, projection_kp).view(num, positions, -1)

from __future__ import annotations

import torch

from _inputs import randn
from cdgrab.balancing.centring import MeanCentred


def test_means_are_of_the_finite_rows_of_each_lane() -> None:
    """A row whose squared length is not finite is none of them, as in the balancer."""
    rows, centring = randn(12, 3, 5), MeanCentred(3)
    rows[2, 0, 1], rows[3, 0, 4], rows[7, 2, 0] = torch.nan, -torch.inf, 1e30
    for part in rows.split(5):
        for centred in centring.add(part, None):
            assert not centred.minus_pLD.any()  # there was no epoch before
    centring.start_epoch()
    [centred] = centring.add(rows[:2], None)
    finite = rows.square().sum(-1).isfinite()
    expected = torch.stack([rows[finite[:, lane], lane].mean(0) for lane in range(3)])
    torch.testing.assert_close(centred.minus_pLD, expected.expand(2, 3, 5))

from __future__ import annotations

import pytest

from cdgrab.balancing.tally import Tally
from cdgrab.metrics import Meter


def test_what_is_refused_takes_no_time() -> None:
    meter = Meter()
    with pytest.raises(ValueError, match="refused"), meter.timed():
        raise ValueError("refused")
    assert meter.seconds == 0
    with meter.timed():
        pass
    assert meter.seconds > 0


def test_bytes_are_those_of_the_epoch() -> None:
    meter = Meter()
    sent = []
    for epoch, so_far in enumerate([100, 130, 130]):
        meter.finish(epoch, [Tally()], 0, so_far)
        sent.append(meter.figures["bytes"])
    assert sent == [100, 30, 0]

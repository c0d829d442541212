"""The default: single examples where that can be done."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from _inputs import randn
from cdgrab import Ordering


def observed(ordering: Ordering, **how: Any) -> list[int]:
    """The order after two epochs with a model that stays as it is."""
    model = nn.Linear(5, 3).requires_grad_(True)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    ordering.attach(model, **how)
    data = randn(32, 5)
    while ordering.epoch < 2:
        model(data[ordering.remaining()[:4]]).square().mean().backward()
    return ordering.order.tolist()


def test_single_examples_are_ordered_by_sketches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = observed(Ordering(32, batch_size=4))
    assert found == observed(Ordering(32, batch_size=4, unit_size=1), source="sketch")
    assert "single examples are ordered by sketches of 1024 numbers" in caplog.text
    assert found != observed(Ordering(32, batch_size=4, unit_size=4), source="batch")


def test_units_that_are_batches_get_gradients_of_batches() -> None:
    found = observed(Ordering(32, batch_size=4, unit_size=4))
    assert found == observed(Ordering(32, batch_size=4, unit_size=4), source="batch")
    assert found == observed(Ordering(32, batch_size=4), source="batch")  # which makes batches the units


def test_orders_without_gradients_need_no_sketches() -> None:
    ordering = Ordering(32, batch_size=4, order="rr")
    model = nn.Linear(5, 3)
    ordering.attach(model)
    assert not model._forward_hooks
    model(randn(4, 5)).sum().backward()
    assert ordering.examples_left == 28


@pytest.mark.parametrize("options", [{"length": 64}, {"reduction": "sum"}, {"strict": True}], ids=str)
def test_options_of_sketches_do_not_apply_to_batches(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are for single examples, but a unit is a batch here"):
        Ordering(32, batch_size=4, unit_size=4).attach(nn.Linear(5, 3), **options)


def test_options_of_other_sources_name_them() -> None:
    with pytest.raises(ValueError, match=r"source 'auto' has no option 'hook'; it takes .*; use source='batch'"):
        Ordering(32, batch_size=4).attach(nn.Linear(5, 3), hook=print)


def test_units_that_have_begun_stay() -> None:
    ordering = Ordering(32, batch_size=4)
    ordering.observe(randn(4, 6))
    with pytest.raises(ValueError, match="unit_size is 1, but a backward pass gives one gradient"):
        ordering.attach(nn.Linear(5, 3), source="batch")

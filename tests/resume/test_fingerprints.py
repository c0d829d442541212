"""A state says of which model and of which data it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from _inputs import randn
from cdgrab import Ordering

X = randn(24, 3)


def attached(model: nn.Module, source: str) -> Ordering:
    ordering = Ordering(24, batch_size=4, unit_size=4 if source == "batch" else 1)
    ordering.attach(model, source=source)
    return ordering


def steps(ordering: Ordering, model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(X[torch.from_numpy(ordering.remaining()[: ordering.batch_size])]).square().mean().backward()


@pytest.mark.parametrize("source", ["batch", "per_example", "sketch"])
def test_rows_of_another_model_are_refused(source: str) -> None:
    """Both models have as many parameters, so that nothing else would tell them apart."""
    model, other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), nn.Sequential(nn.Linear(3, 5), nn.Linear(1, 6))
    first, second = attached(model, source), attached(other, source)
    steps(first, model, 2)
    with pytest.raises(
        ValueError, match=r"parameters whose names and shapes have the digest \w{8}, and here they have"
    ):
        second.load_state_dict(first.state_dict())
    again = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    attached(again, source).load_state_dict(first.state_dict())
    before_attaching = Ordering(24, batch_size=4, unit_size=first.unit_size)
    if source == "sketch":  # its rows have another form in any case
        return
    before_attaching.load_state_dict(first.state_dict())
    second.detach()
    with pytest.raises(ValueError, match="rows of this epoch have been observed already"):
        before_attaching.attach(other, source=source)
    before_attaching.attach(again, source=source)


def test_between_epochs_only_the_order_counts() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 2)
    first, second = attached(model, "per_example"), attached(other, "per_example")
    steps(first, model, 6)
    second.load_state_dict(first.state_dict())
    assert second.order.tolist() == first.order.tolist()
    steps(second, other, 6)
    assert second.epoch == 2


def test_data_may_have_a_fingerprint() -> None:
    def first_and_last(data: range) -> str:
        return f"{data[0]} {data[-1]}"

    saved = Ordering(range(5, 29), batch_size=4, fingerprint=first_and_last).state_dict()
    Ordering(24, batch_size=4, fingerprint="5 28").load_state_dict(saved)
    with pytest.raises(ValueError, match="saved with fingerprint='5 28', this ordering has fingerprint='0 23'"):
        Ordering(range(24), batch_size=4, fingerprint=first_and_last).load_state_dict(saved)
    with pytest.raises(ValueError, match="fingerprint is 24; pass a string, or a function that returns one"):
        Ordering(range(24), batch_size=4, fingerprint=len)  # type: ignore[arg-type]

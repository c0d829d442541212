"""What is easily passed or done by mistake: an error or a line in words, never silence."""

from __future__ import annotations

import copy
import io
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from _inputs import randn
from cdgrab import Ordering
from cdgrab.balancing.rules import FloatArray, Greedy


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (DataLoader(range(3)), r"a DataLoader was passed as the dataset; pass its dataset: Ordering\(loader.dataset"),  # type: ignore[arg-type]
        ({"train": [1, 2], "test": [3]}, "dict maps names to datasets: 'train', 'test'; pass one of"),
    ],
)
def test_what_has_a_length_is_not_always_a_dataset(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ordering(dataset, batch_size=1)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (None, TypeError, r"observe\(\) was given a NoneType; expected a tensor"),
        ("rows", TypeError, "was given a str"),
        ({"a": 1}, TypeError, "was given a dict"),
        ([torch.zeros(3), torch.zeros(2)], ValueError, r"the rows have different shapes: \(2,\), \(3,\)"),
        (torch.zeros(2, 3).to_sparse(), ValueError, r"rows are sparse .*pass rows.to_dense\(\)"),
        (torch.zeros(2, 3, device="meta"), ValueError, "rows are on the device 'meta'"),
    ],
)
def test_what_are_no_rows(rows: Any, error: type[Exception], message: str) -> None:
    ordering = Ordering(8, batch_size=2, unit_size=1)
    with pytest.raises(error, match=message):
        ordering.observe(rows)
    ordering.observe(randn(2, 5))  # nothing of it was kept
    assert ordering.examples_left == 6


def test_rows_in_a_list_are_stacked() -> None:
    rows, orders = randn(8, 3), []
    for as_list in (False, True):
        ordering = Ordering(8, batch_size=2, unit_size=1)
        for part in rows.split(2):
            ordering.observe(list(part) if as_list else part)  # type: ignore[arg-type]
        orders.append(ordering.order.tolist())
    assert orders[0] == orders[1]


def test_the_keys_of_metrics_are_always_the_same() -> None:
    ordering = Ordering(4, batch_size=2, unit_size=1)
    before = ordering.metrics()
    assert before["epoch"] == -1
    assert np.isnan(before["imbalance"])
    for _ in range(2):
        ordering.observe(randn(2, 3))
    assert before.keys() == ordering.metrics().keys()


@pytest.mark.parametrize("order", ["cd-grab", "grab"])
def test_rows_whose_squares_vanish_are_said(order: str, caplog: pytest.LogCaptureFixture) -> None:
    for scale, said in ((1e-25, 1), (1.0, 0)):
        caplog.clear()
        ordering = Ordering(8, batch_size=2, unit_size=1, order=order)
        for part in (scale * randn(8, 3)).split(2):
            ordering.observe(part)
        assert caplog.text.count("squared length of every gradient, or difference of two, is zero") == said


def test_too_few_units_are_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cdgrab")
    Ordering(10, batch_size=16, unit_size=16)
    assert "there is nothing to order: 10 examples make 0 units of 16 for 1 lanes" in caplog.text
    caplog.clear()
    Ordering(32, batch_size=16, unit_size=16)
    assert not caplog.text


class TooFew(Greedy):
    def thresholds(self, num_rows: int, lengths: Any) -> FloatArray:
        return super().thresholds(num_rows - 1, lengths)


class NotANumber(Greedy):
    def thresholds(self, num_rows: int, lengths: Any) -> FloatArray:
        return super().thresholds(num_rows, lengths) + np.nan


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("rule", [TooFew, NotANumber])
def test_a_rule_must_give_a_threshold_for_every_row(rule: type[Greedy]) -> None:
    ordering = Ordering(8, batch_size=4, unit_size=1, rule=rule, block=4)
    ordering.observe(randn(4, 3))
    with pytest.raises(ValueError, match=rf"the rule {rule.__name__} gave thresholds .*one number for each of them"):
        ordering.observe(randn(4, 3))


def test_threads_take_turns() -> None:
    ordering = Ordering(4000, batch_size=1, unit_size=1, block=1)
    row = randn(1, 30)

    def observe() -> None:
        for _ in range(500):
            ordering.observe(row)

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ordering.epoch == 1
    assert ordering.metrics()["unobserved"] == 0


class Checkpointed(nn.Module):
    """Recomputes its body in the backward pass, within that pass or apart from it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def test_a_pass_within_a_pass_is_no_batch_of_its_own() -> None:
    x = randn(4, 4).requires_grad_()
    ordering, model = Ordering(16, batch_size=4, unit_size=4), Checkpointed(reentrant=False)
    ordering.attach(model)
    model(x).sum().backward()
    assert ordering.examples_left == 12
    ordering, model = Ordering(16, batch_size=4, unit_size=4), Checkpointed(reentrant=True)
    ordering.attach(model)
    with pytest.raises(ValueError, match=r"a backward pass took place within another one.*use_reentrant=False"):
        model(x).sum().backward()


@pytest.mark.parametrize("source", ["batch", "per_example", "sketch"])
def test_a_model_is_saved_and_copied_while_it_is_attached(source: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 3, batch_first=True))
    x = randn(4, 5, 4)
    ordering = Ordering(16, batch_size=4, unit_size=None if source == "batch" else 1)
    ordering.attach(model, source=source)
    model(x)[0].sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        other(x)[0].sum().backward()  # is not watched
        assert ordering.examples_left == 12
        torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()))
    model(x)[0].sum().backward()
    assert ordering.examples_left == 8


def test_attaching_what_is_no_model() -> None:
    for source in ("batch", "sketch"):
        ordering = Ordering(16, batch_size=4, unit_size=None if source == "batch" else 1)
        with pytest.raises(ValueError, match=r"attach\(\) was given a str; expected a torch.nn.Module"):
            ordering.attach("x", source=source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("batch", {"length": 64}, "source 'batch' has no option 'length'; it takes hook, hook_state"),
        ("per_example", {"length": 64}, "source 'per_example' has no option 'length'; it takes reduction"),
        ("sketch", {"fitted": True}, "source 'sketch' has no option 'fitted'; it takes reduction, length"),
        ("sketch", {"hook": print}, "source 'sketch' has no option 'hook'"),
        ("sketch", {"reduction": "none"}, "reduction is 'none'; pass the reduction of the loss"),
        ("ghost", {}, "source 'ghost' is gone: use 'sketch'"),
        ("best", {}, "unknown source 'best'; choose one of auto, batch, per_example, sketch"),
        (3, {}, r"source is 3; pass one of 'auto', .* or an object with attach\(port, model\)"),
    ],
)
def test_sources_and_their_options(source: Any, options: dict[str, Any], message: str) -> None:
    ordering = Ordering(16, batch_size=4, unit_size=1)
    with pytest.raises(ValueError, match=message):
        ordering.attach(nn.Linear(3, 2), source=source, **options)
    ordering.observe(randn(4, 3))  # which nothing attached forbids


def test_a_state_is_a_dict() -> None:
    with pytest.raises(ValueError, match=r"the state of an ordering is the dict that .* returned; found a NoneType"):
        Ordering(16, batch_size=4, unit_size=4).load_state_dict(None)  # type: ignore[arg-type]


def test_compiled_modules_are_unwrapped() -> None:
    model = nn.Linear(4, 2)
    ordering = Ordering(16, batch_size=4, unit_size=4)
    ordering.attach(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    model(randn(4, 4)).sum().backward()
    assert ordering.examples_left == 12


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"])
def test_wrappers_that_cannot_be_served_are_named(name: str) -> None:
    wrapper = type(name, (nn.Module,), {})()
    with pytest.raises(ValueError, match=f"{name} cannot be attached: it .*use"):
        Ordering(16, batch_size=4, unit_size=4).attach(wrapper)


def test_closing_detaches() -> None:
    ordering, model = Ordering(16, batch_size=4, unit_size=4), nn.Linear(4, 2)
    ordering.attach(model)
    for _ in range(2):
        ordering.close()
    model(randn(4, 4)).sum().backward()
    assert ordering.examples_left == 16

"""Sketches that are replayed, here without a GPU: what a CUDA graph does is done by a trace, whose every decision is
as fixed as a graph's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy

from _models import MODELS, build
from _sketches import listen, sketches
from cdgrab import Ordering
from cdgrab.ghost.passes import Seen
from cdgrab.hooks import later, replayed
from cdgrab.hooks.replayed import Make


class Traced:
    """Stands in for `Recording`."""

    pool = None

    def __init__(self, seen: list[Seen], make: Make, into_ND: Tensor, pool: Any, *, copied: bool) -> None:  # noqa: ARG002
        self.copied = copied

        def run(*tensors: Tensor) -> Tensor:
            places = zip(seen, tensors[0::2], tensors[1::2], strict=True)
            return make([Seen(one.layer, x, grad, one.shape) for one, x, grad in places]).rows_ND

        self._trace = make_fx(run)(*_tensors(seen))
        self._into_ND = into_ND

    def __call__(self, seen: list[Seen]) -> None:
        self._into_ND.copy_(self._trace(*_tensors(seen)))


def _tensors(seen: list[Seen]) -> list[Tensor]:
    return [tensor for one in seen for tensor in (one.x, one.grad)]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors lie where they lay the step before, as on a GPU."""
    monkeypatch.setattr(later, "recordable", lambda grad: True)
    monkeypatch.setattr(replayed, "Recording", Traced)
    monkeypatch.setattr(replayed, "places", lambda seen: ())
    monkeypatch.setattr(replayed, "_LITTLE", 0)


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_same(name: str) -> None:
    expected, never = sketches(name, replays=False)
    found, recordings = sketches(name, replays=True)
    assert never == 0
    if name not in ("unknown", "lstm"):  # where all layers may be of kinds that are differentiated once more
        assert recordings == 2  # of whole and of short batches
    same(found, expected)


@pytest.mark.parametrize("room", [1, 1 << 25])
def test_parameters_that_are_frozen_and_trained_again(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "room_for", lambda grad: room)

    def freeze(model: nn.Module, step: int) -> None:
        for parameter in list(model.parameters())[: 2 if step % 2 else 1]:
            parameter.requires_grad_(not 12 <= step < 18)

    expected, _ = sketches("mlp", replays=False, epochs=5, before=freeze)
    found, _ = sketches("mlp", replays=True, epochs=5, before=freeze)
    same(found, expected)
    assert not expected[13][:, :5].any()
    assert expected[19][:, :5].any()


def test_a_recording_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def __init__(self, seen: list[Seen], make: Make, *_: Any, copied: bool) -> None:  # noqa: ARG002
            last = seen[-1]
            make([*seen[:-1], Seen(last.layer, last.x[:2], last.grad, last.shape)])  # too few for as many gradients

    monkeypatch.setattr(replayed, "Recording", Failing)
    expected, _ = sketches("mlp", replays=False)
    with caplog.at_level(logging.WARNING, "cdgrab"):
        found, recordings = sketches("mlp", replays=True)
    assert recordings == 0
    assert [record.getMessage()[:30] for record in caplog.records] == ["sketches cannot be recorded as"]
    same(found, expected)


@pytest.mark.parametrize("name", ["mlp", "lenet", "tied", "used twice"])
def test_layers_are_looked_at_before_they_take_too_much_room(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "room_for", lambda grad: 1)
    expected, _ = sketches(name, replays=False)
    found, recordings = sketches(name, replays=True)
    assert recordings > 2
    same(found, expected)


def test_tensors_that_move_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(10**6))
    monkeypatch.setattr(replayed, "places", lambda seen: next(steps))
    made: list[bool] = []
    monkeypatch.setattr(replayed, "_MOST_MOVES", 5)
    monkeypatch.setattr(Traced, "__init__", _noting(made, Traced.__init__))
    expected, _ = sketches("mlp", replays=False, epochs=5)
    found, recordings = sketches("mlp", replays=True, epochs=5)
    assert recordings == 1  # of whole batches, which there were enough of
    assert made == [True]
    same(found, expected)


def test_little_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "_LITTLE", 1 << 20)
    steps = iter(range(10**6))
    monkeypatch.setattr(replayed, "places", lambda seen: next(steps))
    made: list[bool] = []
    monkeypatch.setattr(Traced, "__init__", _noting(made, Traced.__init__))
    expected, _ = sketches("mlp", replays=False, epochs=5)
    found, recordings = sketches("mlp", replays=True, epochs=5)
    assert recordings == 2  # of whole and of short batches
    assert made == [True, True]
    same(found, expected)


def test_tensors_that_lie_in_turns_in_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(10**6))
    monkeypatch.setattr(replayed, "places", lambda seen: next(steps) % 2)
    made: list[bool] = []
    monkeypatch.setattr(Traced, "__init__", _noting(made, Traced.__init__))
    expected, _ = sketches("mlp", replays=False, epochs=5)
    found, _ = sketches("mlp", replays=True, epochs=5)
    assert made
    assert not any(made)
    same(found, expected)


def _noting(made: list[bool], init: Callable[..., None]) -> Callable[..., None]:
    """`init`, noting whether there are copies."""

    def noted(self: Traced, *args: Any, copied: bool, **kwargs: Any) -> None:
        made.append(copied)
        init(self, *args, copied=copied, **kwargs)

    return noted


class Flattened(nn.Module):
    """Whose layer sees all positions as if they were examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x_NTd: Tensor) -> Tensor:
        scores: Tensor = self.layer(x_NTd.flatten(0, 1)).unflatten(0, x_NTd.shape[:2]).mean(1)
        return scores


def flattened(lengths: list[int], *, replays: bool) -> tuple[list[Tensor], int]:
    """Batches of sequences of these lengths; six examples each, and four in the last of an epoch of five."""
    torch.manual_seed(0)
    model, ordering = Flattened(), Ordering(28, batch_size=6, unit_size=1, order="rr")
    found = listen(ordering, model, replays=replays, length=6, fitted=False)
    for number, length in enumerate(lengths):
        num = 4 if number % 5 == 4 else 6
        x = torch.randn(num, length, 4, dtype=torch.float64)
        cross_entropy(model(x), torch.arange(num) % 3).backward()
    attachment: Any = ordering._attachment
    return found, len(attachment.replays._recorded)


def test_as_many_positions_of_fewer_examples() -> None:
    lengths = [2, 2, 2, 2, 3] * 3  # six times two, and four times three
    expected, _ = flattened(lengths, replays=False)
    found, recordings = flattened(lengths, replays=True)
    assert recordings == 2
    same(found, expected)


def test_sequences_of_many_lengths_are_not_recorded_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "_MOST_RECORDED", 4)
    lengths = [1, 2, 3, 4, 5, 6, 7, 8] * 5
    expected, _ = flattened(lengths, replays=False)
    found, recordings = flattened(lengths, replays=True)
    assert recordings == 4
    same(found, expected)


def test_what_a_hook_changes_before_the_pass_ends_is_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    ordering = Ordering(60, batch_size=6, unit_size=1, order="rr")
    listen(ordering, model, replays=True, length=6, fitted=False)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    cross_entropy(model(x), y).backward()
    kept: list[Tensor] = []

    def spoil(grad: Tensor) -> None:  # noqa: ARG001
        kept[0].zero_()

    model[1].register_forward_hook(lambda module, args, output: output.register_hook(kept.append) and None)
    model[0].register_forward_hook(lambda module, args, output: output.register_hook(spoil) and None)
    with pytest.raises(ValueError, match=r"layer '1' \(Linear\) took or gave was changed in place"):
        cross_entropy(model(x), y).backward()


def test_gradients_asked_for_otherwise_leave_nothing() -> None:
    model, x, y = build("mlp", 6)
    ordering = Ordering(60, batch_size=6, unit_size=1, order="rr")
    listen(ordering, model, replays=True, length=6, fitted=False)
    cross_entropy(model(x), y).backward()
    attachment: Any = ordering._attachment
    here = x.requires_grad_()
    put_off: list[int] = []
    layer = model[0]  # type: ignore[index]
    layer.register_forward_hook(
        lambda module, args, output: (
            output.register_hook(lambda grad: put_off.append(len(attachment._put_off._noted))) and None
        )
    )
    torch.autograd.grad(cross_entropy(model(here), y), here)
    assert put_off == [0]  # it came by, and nothing had been kept
    assert not attachment._put_off._noted
    assert not attachment.sketcher.parts
    assert not attachment.sketcher._pieces
    assert ordering.examples_left == 54

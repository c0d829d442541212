"""Layers that are looked at after the pass, from copies of what they saw, as on a GPU; here without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _copied import Copied
from _inputs import randn
from _models import build, orders_of_an_mlp
from cdgrab import Ordering, World
from cdgrab.ghost import passes
from cdgrab.ghost.pairs import MOST_BYTES
from cdgrab.hooks.recorder import Recorder


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers are put off as on a GPU, and pairs like others replayed; these layers have been copied afresh."""
    monkeypatch.setattr("cdgrab.hooks.later.recordable", lambda _: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda one: 2 * one.size <= MOST_BYTES)
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda first, second, _: first.kind == second.kind)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", Copied)
    Copied.made.clear()
    made: list[str] = []
    copied = passes.Seen.copied

    def noted(self: passes.Seen) -> passes.Seen:
        made.append(self.layer.name)
        return copied(self)

    monkeypatch.setattr(passes.Seen, "copied", noted)
    return made


def attached(model: nn.Module) -> tuple[Ordering, Any]:
    ordering = Ordering(400, batch_size=4, unit_size=1, world=World.simulated(4), seed=1)
    ordering.attach(model, source="ghost")
    return ordering, ordering._sorter


@pytest.mark.parametrize("name", ["mlp", "tied", "lstm", "used twice"])
@pytest.mark.parametrize("saved", [None, 9, 10])
def test_layers_that_are_looked_at_later(name: str, saved: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they saw is copied, and records are made of the copies; a state is taken of a turn like that, too."""

    def orders(save_at: int | None) -> list[list[int]]:
        model, x, y = build(name, 26)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fresh() -> Ordering:
            made = Ordering(26, batch_size=3, unit_size=1, world=World.simulated(3), seed=3)
            made.attach(model, source="ghost")
            return made

        ordering, steps = fresh(), 0
        while ordering.epoch < 3:
            index = torch.from_numpy(ordering.remaining()[:3])
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == save_at:
                state = ordering.state_dict()
                assert ordering._attachment is not None
                ordering._attachment.detach()
                ordering = fresh()
                ordering.load_state_dict(state)
        return [order.tolist() for order in ordering.orders]

    expected = orders(None)
    seen: list[int] = []
    made_records = Recorder.made_records

    def noted(self: Recorder, layers: list[Any], *how: Any) -> Any:
        seen.append(len(layers))
        return made_records(self, layers, *how)

    monkeypatch.setattr(Recorder, "made_records", noted)
    monkeypatch.setattr("cdgrab.hooks.later.recordable", lambda _: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda _: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", Copied)
    Copied.made.clear()
    for room in (1, 1 << 20):  # layers are copied one by one, or all together
        monkeypatch.setattr("cdgrab.hooks.later.LEAST_ROOM", room)
        Copied.made.clear()
        seen.clear()
        assert orders(saved) == expected
        assert max(seen) > 0
        assert Copied.made
        assert all(copied.turns > 2 for copied in Copied.made)


@pytest.mark.parametrize("alike", [True, False])
def test_passes_that_are_never_alike_are_not_copied(
    alike: bool, copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdgrab.ghost.sorter._MOST_MISSED", 6)
    model = nn.Linear(3, 4)
    _, sorter = attached(model)
    copied = []
    for positions in range(1, 15):
        model(randn(4, 5 if alike else positions, 3)).square().mean().backward()
        copied.append(len(copies))
    # The first is held against the gradient; if the next are not like each other, seven are copied for nothing.
    assert copied == ([0, 1, 2, 3] + 10 * [3] if alike else [0, 1, 2, 3, 4, 5, 6] + 7 * [7])
    assert sorter.looks_later == alike
    assert bool(sum(made.turns for made in Copied.made)) == alike


@pytest.mark.usefixtures("copies")
def test_steps_that_are_too_large_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdgrab.ghost.sorter._MOST_MISSED", 6)
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda one: one.size < 10**4)
    model = nn.Linear(3, 4)
    _, sorter = attached(model)
    for step in range(24):
        model(randn(4, 500 if step < 12 else 5, 3)).square().mean().backward()
    assert sorter.looks_later
    assert Copied.made[0].turns > 2


def test_what_layers_saw_is_what_counts(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a convolution are small, its inputs are not."""
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda one: one.size < 10**4)
    model = nn.Conv2d(1, 1, 3)
    _, sorter = attached(model)
    for _ in range(4):
        model(randn(4, 1, 40, 40)).square().mean().backward()
        assert not sorter.looks_later
    assert not copies


def test_a_pass_that_grows_is_not_copied_without_end(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdgrab.hooks.later.LEAST_ROOM", 1)
    monkeypatch.setattr("cdgrab.ghost.sorter.MOST_BYTES", 10**5)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    attached(model)
    model(randn(4, 1, 8)).square().mean().backward()
    model(randn(4, 60, 8)).square().mean().backward()
    assert copies == ["5", "4", "3"]


def test_no_room_for_copies(
    copies: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: passes.Seen) -> None:
        raise torch.OutOfMemoryError("no room")

    expected = orders_of_an_mlp()
    assert copies
    monkeypatch.setattr(passes.Seen, "copied", refuse)
    assert orders_of_an_mlp() == expected
    assert caplog.messages == ["pairs cannot be recorded as a CUDA graph, and are balanced without: no room"]


def test_steps_of_several_turns_are_not_copied(copies: list[str]) -> None:
    """Not even after a last step of a single turn."""
    model = nn.Linear(3, 4)
    ordering = Ordering(33, batch_size=16, unit_size=1)
    ordering.attach(model, source="ghost")
    for _ in range(9):
        model(randn(len(ordering.remaining()[:16]), 3)).square().mean().backward()
    assert ordering.epoch == 3
    assert not copies


def frozen_in_between(when: int, *, saved: bool) -> tuple[dict[str, Tensor], list[int]]:
    """The running sum, and an order, where a weight is frozen from this step on, or only while a state is taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    ordering, sorter = attached(model)
    sums: dict[str, Tensor] = {}
    for step in range(100):
        if step == when:
            model[0].weight.requires_grad_(False)
            if saved:
                state = ordering.state_dict()
                model[0].weight.requires_grad_(True)
                assert ordering._attachment is not None
                ordering._attachment.detach()  # from the model: the next one is attached to it
                ordering, sorter = attached(model)
                ordering.load_state_dict(state)
        model(randn(4, 3, seed=step, dtype=torch.float64)).square().mean().backward()
        if step == when + 2:
            sums = {name: part.clone() for name, part in sorter.running_sum.items()}
    return sums, ordering.order.tolist()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("when", [8, 9])
def test_a_parameter_that_is_frozen_in_between(when: int, saved: bool, request: pytest.FixtureRequest) -> None:
    """What a held pass saw of it counts, as if it had been looked at in the pass."""
    expected = frozen_in_between(when, saved=saved)
    request.getfixturevalue("copies")
    found = frozen_in_between(when, saved=saved)
    assert Copied.made
    for name, part in expected[0].items():
        torch.testing.assert_close(found[0][name], part)
    assert found[1] == expected[1]


@pytest.mark.usefixtures("copies")
def test_a_pass_unlike_the_others_is_held_as_records() -> None:
    """Which are what they are, whatever happens to what the layers saw."""
    sums = []
    for spoilt in (False, True):
        torch.manual_seed(0)
        model = nn.Conv1d(2, 3, 3)
        _, sorter = attached(model)
        for step, length in enumerate((9, 9, 9, 9, 9, 9, 30, 9)):
            x = randn(4, 2, length, seed=step).requires_grad_()
            model(x).square().mean().backward()
            if length == 30:
                assert not sorter._held.seen
                assert sum(tensor.nbytes for tensor in sorter._held.tensors) < x.nbytes
            if spoilt:
                with torch.no_grad():
                    x.zero_()
        assert Copied.made[-1].turns > 1
        sums.append(torch.cat([part.flatten() for part in sorter.running_sum.values()]))
    assert torch.equal(*sums)


def test_what_is_asked_of_a_graph_in_between_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that asks for the gradient of an input comes by some layers, and is not a batch."""

    def orders(asking: bool) -> list[list[int]]:
        model, x, y = build("mlp", 24)
        ordering = Ordering(24, batch_size=3, unit_size=1, world=World.simulated(3), seed=3)
        ordering.attach(model, source="ghost")
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[:3])
            inputs = x[batch].clone().requires_grad_()
            loss = cross_entropy(model(inputs), y[batch])
            if asking:
                torch.autograd.grad(loss, inputs, retain_graph=True)
            loss.backward()
        return [order.tolist() for order in ordering.orders]

    expected = orders(asking=False)
    monkeypatch.setattr("cdgrab.hooks.later.recordable", lambda _: True)
    monkeypatch.setattr("cdgrab.hooks.later.LEAST_ROOM", 1)
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda _: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.replayable", lambda *_: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.ReplayedPairs", Copied)
    Copied.made.clear()
    assert orders(asking=True) == expected
    assert sum(copied.turns for copied in Copied.made) > 8


def test_what_changes_before_it_is_looked_at_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.bad = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if self.bad:
                hidden.register_hook(lambda grad: grad.zero_())
            found: Tensor = self.second(hidden)
            return found

    monkeypatch.setattr("cdgrab.hooks.later.recordable", lambda _: True)
    monkeypatch.setattr("cdgrab.ghost.sorter.small_enough", lambda _: True)
    model = InPlace()
    ordering = Ordering(40, batch_size=4, unit_size=1, world=World.simulated(4))
    ordering.attach(model, source="ghost")
    for _ in range(3):
        model(randn(4, 3)).square().mean().backward()
    model.bad = True
    with pytest.raises(ValueError, match=r"'first' .* was changed in place"):
        model(randn(4, 3)).square().mean().backward()

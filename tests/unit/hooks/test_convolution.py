"""Convolutions that are given the gradient of their weights: what they would have found themselves."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from cdgrab import Ordering, World, per_example_grads
from cdgrab.ghost.layers import HANDLERS, Records, convolution
from cdgrab.hooks.convolution import Given

SOURCES = ["ghost", "per_example", "sketch"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)),
        *(nn.Tanh(), nn.Flatten(2), nn.Conv1d(6, 3, 2), nn.Flatten(), nn.Linear(9, 5)),
    ).double()


def batch(num: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    return randn(num, 2, 6, 6, seed=seed, dtype=torch.float64)[..., :5], torch.arange(num) % 5


def attached(model: nn.Module, source: str = "ghost", num: int = 60, **options: Any) -> Ordering:
    ordering = Ordering(num, batch_size=6, unit_size=1, world=World.simulated(6))
    ordering.attach(model, source=source, **options)
    return ordering


def grads(model: nn.Module, steps: int = 3, **options: Any) -> list[Tensor]:
    """Of some steps; the first is one that attachments check."""
    found = []
    for step in range(steps):
        x, y = batch(seed=step)
        model.zero_grad()
        cross_entropy(model(x), y, **options).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


class Taken:
    """Counts what convolutions took of what they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        take = Given.take

        def counted(given: Given, grad: Tensor) -> tuple[dict[str, Tensor], Any]:
            found, check = take(given, grad)
            self.names += found
            return found, check

        monkeypatch.setattr(Given, "take", counted)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("source", SOURCES)
def test_gradients_are_those_of_the_layer(source: str, reduction: str, taken: Taken) -> None:
    expected = grads(network(), reduction=reduction)
    model = network()
    attached(model, source, reduction=reduction)
    for found, one in zip(grads(model, reduction=reduction), expected, strict=True):
        torch.testing.assert_close(found, one)
    # Weights of four convolutions and biases of three; a sketch writes no rows that are long.
    assert len(taken.names) == 3 * (6 if source == "sketch" else 7)


@pytest.mark.parametrize("source", SOURCES)
def test_a_short_batch(source: str, taken: Taken) -> None:
    models = [network(), network()]
    ordering = Ordering(10, batch_size=6, unit_size=1)
    ordering.attach(models[0], source=source)
    for num in (6, 4):
        x, y = batch(num)
        for model in models:
            model.zero_grad()
            cross_entropy(model(x), y).backward()
        for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(first.grad, second.grad)
    assert ordering.epoch == 1
    assert len(taken.names) == 2 * (6 if source == "sketch" else 7)


def test_nothing_is_found_twice() -> None:
    """Which is what all this is for."""
    model = network()
    attached(model)
    wanted: list[list[bool]] = []
    convolution_backward = torch.ops.aten.convolution_backward

    def watched(*args: Any) -> Any:
        wanted.append(args[-1])
        return convolution_backward(*args)

    grads(model, steps=1)
    with mock.patch.object(torch.ops.aten, "convolution_backward", watched):
        grads(model, steps=1)
    assert wanted == [[True, False, False]] * 3  # the first layer's input has no gradient


@pytest.mark.parametrize("what", ["7.weight", "7.bias", "4.weight"])
def test_rows_that_are_wrong_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is held against what the layer itself finds; the fifth has groups."""
    number, key = what.split(".")

    def wrong(module: Any, x: Tensor, grad: Tensor, num: int) -> Records:
        found = convolution(module, x, grad, num)
        if module.out_channels == model[int(number)].out_channels:
            found[key] = found[key].scaled(2.0)
        return found

    model = network()
    attached(model)
    monkeypatch.setitem(HANDLERS, nn.Conv1d, wrong)
    monkeypatch.setitem(HANDLERS, nn.Conv2d, wrong)
    with pytest.raises(ValueError, match=rf"do not add up to that of the batch for the parameter '{number}\.{key}'"):
        grads(model, steps=1)


def test_a_weight_that_is_used_elsewhere_is_noticed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.conv2d(self.conv(x), self.conv.weight).flatten(1)

    model = Twice().double()
    attached(model)
    with pytest.raises(ValueError, match="outside of its layer"):
        model(batch()[0]).square().mean().backward()


@pytest.mark.parametrize("how", ["returned", "in place"])
def test_hooks_that_change_the_gradient(how: str, taken: Taken) -> None:
    """After ours: what was found before does not count. (Rows are of the gradient before; so are those of others.)"""

    def trained(*, watched: bool) -> list[Tensor]:
        model = network()
        if watched:
            attached(model, "per_example")

        def change(grad: Tensor) -> Tensor | None:
            if how == "returned":
                return 2 * grad
            grad.mul_(2)
            return None

        def after(module: nn.Module, args: Any, output: Tensor) -> None:  # noqa: ARG001
            if changes:
                output.register_hook(change)

        model[4].register_forward_hook(after)
        changes = False
        grads(model, steps=1)
        changes = True
        return grads(model, steps=1)

    for found, expected in zip(trained(watched=True), trained(watched=False), strict=True):
        torch.testing.assert_close(found, expected)
    assert taken.names.count("weight") == 4 + 3


def test_gradients_of_gradients(taken: Taken) -> None:
    def found(model: nn.Module) -> list[Tensor]:
        x, y = batch()
        model.zero_grad()
        loss = cross_entropy(model(x), y)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum((grad.square().sum() for grad in first), torch.zeros(()))
        return list(torch.autograd.grad(penalty, list(model.parameters())))

    model = network()
    attached(model)
    for one, expected in zip(found(model), found(network()), strict=True):
        torch.testing.assert_close(one, expected)
    assert not taken.names


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_gradients_of_gradients_that_were_left_in_parameters(taken: Taken) -> None:
    def found(model: nn.Module) -> list[Tensor]:
        x, y = batch()
        cross_entropy(model(x), y).backward(create_graph=True)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        penalty = sum((grad.square().sum() for grad in grads), torch.zeros(()))
        second = torch.autograd.grad(penalty, list(model.parameters()))
        model.zero_grad()
        return [*second, *(grad.detach() for grad in grads)]

    model = network()
    attached(model)
    for one, expected in zip(found(model), found(network()), strict=True):
        torch.testing.assert_close(one, expected)
    assert not taken.names


def test_gradients_under_autocast(taken: Taken) -> None:
    def found(model: nn.Module) -> list[Tensor]:
        x, y = batch()
        cross_entropy(_in_half(model, x), y).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = network()
    attached(model)
    for one, expected in zip(found(model), found(network()), strict=True):
        assert torch.equal(one, expected)
    assert not taken.names


def test_a_graph_that_stays(taken: Taken) -> None:
    """Every pass gives anew, and what is only asked for is found by the layer."""
    models = [network(), network()]
    attached(models[0])
    x, y = batch()
    for model in models:
        for _ in range(2):
            loss = cross_entropy(model(x), y)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad)
    assert len(taken.names) == 2 * 7


def _as_they_are(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


def _in_half(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _as_they_are(model.float(), x.float()).double()


def _with_tangents(model: nn.Module, x: Tensor) -> Tensor:
    both: Any = torch.func.jvp(lambda x: _as_they_are(model, x), (x,), (torch.ones_like(x),))
    return torch.cat(both)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of PyTorch's own
@pytest.mark.parametrize("run", [_in_half, _with_tangents], ids=["autocast", "forward mode"])
def test_whatever_else_convolutions_are_used_for(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, x = network(), batch()[0]
    expected = run(network(), x)
    attached(model)
    torch.testing.assert_close(run(model, x), expected)
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), expected)


def test_torch_func_is_not_disturbed() -> None:
    expected = per_example_grads(network(), cross_entropy, *batch())
    model = network()
    ordering = attached(model)
    torch.testing.assert_close(per_example_grads(model, cross_entropy, *batch()), expected)
    assert ordering.examples_left == 60


def test_detaching_brings_the_layer_back() -> None:
    model = network()
    before, shown = [type(module) for module in model], str(model)
    ordering = attached(model)
    assert type(model[0]) is not nn.Conv2d
    assert str(model) == shown
    ordering.detach()
    assert [type(module) for module in model] == before
    assert grads(model, steps=1)[0].equal(grads(network(), steps=1)[0])


def test_copies_of_an_attached_model_are_independent() -> None:
    model, x = network(), batch()[0]
    ordering = attached(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("0.weight").zero_()
        assert not torch.equal(other(x), model(x))
    shallow = copy.copy(model[0])
    shallow._parameters = {key: nn.Parameter(torch.zeros_like(p)) for key, p in model[0].named_parameters()}
    assert shallow(x).count_nonzero() == 0
    ordering.detach()
    assert grads(model, steps=1)[0].equal(grads(network(), steps=1)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tracing
def test_a_traced_model_can_be_saved() -> None:
    model, x = network(), batch()[0]
    attached(model)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x, check_trace=False), buffer)
    buffer.seek(0)
    loaded: Any = torch.jit.load(buffer)
    torch.testing.assert_close(loaded(x), network()(x))


def test_whoever_came_first_stays() -> None:
    model = network()
    own: Any = model[0].forward
    vars(model[0])["forward"] = lambda x: 0 * own(x)
    ordering = attached(model)
    assert model[:1](batch()[0]).count_nonzero() == 0
    ordering.detach()
    assert model[:1](batch()[0]).count_nonzero() == 0


def test_frozen_layers_and_single_images() -> None:
    model = network()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    attached(model)
    reference = network()
    reference[0].requires_grad_(False)
    reference[2].bias.requires_grad_(False)
    for found, expected in zip(grads(model), grads(reference), strict=True):
        torch.testing.assert_close(found, expected)
    image = batch()[0][0]
    torch.testing.assert_close(model[0](image), reference[0](image))


def test_what_was_given_is_not_kept() -> None:
    """Also where the layer's own pass never came."""
    model = network()
    attached(model)
    grads(model, steps=1)
    nodes: list[Any] = []
    model[0].register_forward_hook(lambda module, args, output: nodes.append(output.grad_fn))
    x, y = batch()
    cross_entropy(model(x), y).backward(inputs=[model[2].weight])
    assert nodes[0].given._grad is None
    assert nodes[0].given._found == {}


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_training_goes_on_to_the_bit(stop: int) -> None:
    """Where the layer is checked again, after a resume, its gradient is no other than it would have been."""

    def run(steps: range, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            x, y = randn(6, 2, 6, 5, seed=step), torch.arange(6) % 5
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    straight = network().float()
    attached(straight)
    run(range(5), straight)
    model = network().float()
    ordering = attached(model)
    run(range(stop), model)
    state = copy.deepcopy((model.state_dict(), ordering.state_dict()))
    again = network().float()
    other = attached(again)
    again.load_state_dict(state[0])
    other.load_state_dict(state[1])
    run(range(stop, 5), again)
    for found, expected in zip(again.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)

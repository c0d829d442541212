"""What hooks make of a backward pass: which ones are batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy

from _inputs import randn
from cdgrab import Ordering
from cdgrab.per_example.engine import register

SOURCES = ["per_example", "sketch"]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def attached(model: nn.Module, source: str = "per_example", *, strict: bool = False, **options: Any) -> Ordering:
    ordering = Ordering(40, batch_size=4, unit_size=1, lanes=4, **options)
    ordering.attach(model, source=source, strict=strict)
    return ordering


@pytest.mark.parametrize("source", SOURCES)
def test_only_passes_that_leave_gradients_are_batches(source: str) -> None:
    model, x = two_layers(), randn(4, 3).requires_grad_()
    ordering = attached(model, source)
    left = 40
    for _ in range(4):
        loss = model(x).square().mean()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        assert ordering.examples_left == left
        loss.backward()
        left -= 4
        assert ordering.examples_left == left


def test_a_pass_to_one_parameter_is_a_batch() -> None:
    model = two_layers()
    ordering = attached(model, order="rr")
    for _ in range(2):
        model(randn(4, 3)).square().mean().backward()
    for number, parameter in enumerate(model.parameters(), start=3):
        model(randn(4, 3)).square().mean().backward(inputs=[parameter])
        assert ordering.examples_left == 40 - 4 * number


def test_batches_are_seen_after_parameters_have_moved_or_are_frozen() -> None:
    """Gradients of a parameter of another type go elsewhere than before, and those of a frozen one nowhere."""
    model = two_layers()
    ordering = attached(model, order="rr")
    model(randn(4, 3)).square().mean().backward()
    model.double()
    model(randn(4, 3).double()).square().mean().backward()
    assert ordering.examples_left == 32
    model[0].requires_grad_(False)
    model(randn(4, 3).double()).square().mean().backward()
    assert ordering.examples_left == 28


@pytest.mark.parametrize("source", SOURCES)
def test_hooks_of_others(source: str) -> None:
    """On the same tensors, before and after ours."""

    def order(*, others: bool) -> tuple[list[int], list[str], list[float]]:
        model, seen = two_layers(), []

        def watch(name: str) -> Any:
            def after(module: nn.Module, args: Any, output: Tensor) -> None:  # noqa: ARG001
                handle = output.register_hook(lambda _: seen.append(f"removed {name}"))
                output.register_hook(lambda _: seen.append(name))
                handle.remove()

            return after

        if others:
            model[0].register_forward_hook(watch("before"))
        ordering = attached(model, source)
        if others:
            model[0].register_forward_hook(watch("after"))
        for step in range(10):
            model(randn(4, 3, seed=step)).square().mean().backward()
        grads = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        return ordering.order.tolist(), seen, grads

    found, seen, grads = order(others=True)
    assert (found, [], grads) == order(others=False)
    assert seen == ["before", "after"] * 10


def test_hooks_on_a_tensor_without_a_history() -> None:
    seen: list[Tensor] = []
    leaf = torch.ones(3, requires_grad=True)
    register(leaf, seen.append)
    (2 * leaf).sum().backward()
    assert seen[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("source", SOURCES)
def test_an_input_that_nobody_needs_may_change_before_the_pass(source: str) -> None:
    """Where only biases are trained, PyTorch does not mind either."""

    def order(*, changed: bool) -> list[int]:
        model = two_layers()
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(False)
        ordering = attached(model, source)
        for step in range(10):
            x = randn(4, 3, seed=step)
            loss = model(x).square().mean()
            if changed:
                x.zero_()
            loss.backward()
        return ordering.order.tolist()

    assert order(changed=True) == order(changed=False)


def test_an_input_that_is_needed_may_not() -> None:
    model = nn.Embedding(5, 3)
    attached(model)
    index = torch.tensor([0, 1, 2, 3])
    loss = model(index).square().mean()
    index.zero_()
    with pytest.raises(ValueError, match=r"\(Embedding\) was changed in place"):
        loss.backward()


class Shift(nn.Module):
    """Runs once more for its gradients. PyTorch itself does not need its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_an_input_of_a_layer_that_runs_again_may_not() -> None:
    layers = nn.ModuleList([nn.Linear(3, 5), Shift()])
    attached(layers, strict=True)
    hidden = layers[0](randn(4, 3))
    loss = layers[1](hidden).square().mean()
    hidden.add_(1.0)
    with pytest.raises(ValueError, match=r"layer '1' \(Shift\) was changed in place"):
        loss.backward()


@pytest.mark.parametrize("source", SOURCES)
def test_a_graph_that_is_used_up(source: str) -> None:
    model = two_layers()
    ordering = attached(model, source)
    for _ in range(3):
        loss = cross_entropy(model(randn(4, 3)), torch.zeros(4, dtype=torch.int64))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert ordering.examples_left == 28


@pytest.mark.parametrize("source", SOURCES)
def test_losses_may_be_found_first_and_differentiated_then(source: str) -> None:
    def trained(*, interleaved: bool) -> Ordering:
        model = two_layers()
        ordering = attached(model, source)
        for step in range(0, 10, 2):
            x, y = randn(4, 3, seed=step), randn(4, 3, seed=step + 1)
            loss = model(x).square().mean()
            if interleaved:
                loss.backward()
            other = model(y).square().mean()
            if not interleaved:
                loss.backward()
            other.backward()
        return ordering

    ordering = trained(interleaved=False)
    assert ordering.epoch == 1
    assert ordering.order.tolist() == trained(interleaved=True).order.tolist()


def test_a_second_pass_is_an_error() -> None:
    model = two_layers()
    ordering = attached(model)
    for _ in range(2):
        loss = model(randn(4, 3)).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(ValueError, match="second backward pass after one forward pass"):
            loss.backward()
    assert ordering.examples_left == 32


@pytest.mark.parametrize("source", SOURCES)
def test_a_graph_counts_once(source: str) -> None:
    """Also if there were other forward passes, of which nothing came."""
    model = two_layers()
    ordering = attached(model, source)
    for step in range(1, 5):
        model(randn(4, 3))
        loss = model(randn(4, 3)).square().mean()
        loss.backward(retain_graph=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="second backward pass after one forward pass"):
                loss.backward(retain_graph=True)
        assert ordering.examples_left == 40 - 4 * step


def test_a_pass_that_broke_off_may_be_tried_again() -> None:
    model = two_layers()
    ordering = attached(model)
    for step in range(1, 5):
        hidden = model[1](model[0](randn(4, 3)))
        breaks = hidden.register_hook(lambda _: 1 / 0)
        loss = model[2](hidden).square().mean()
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        breaks.remove()
        loss.backward()
        assert ordering.examples_left == 40 - 4 * step


def test_what_comes_back_after_detaching_is_ignored() -> None:
    model = two_layers()
    ordering = attached(model)
    loss = model(randn(4, 3)).square().mean()
    ordering.detach()
    loss.backward()
    assert ordering.examples_left == 40


def test_nodes_of_a_graph_are_not_kept() -> None:
    """They belong to a stream, and the next pass may come on another."""
    model = two_layers()
    attached(model)
    for step in range(3):
        loss = model(randn(4, 3, seed=step)).square().mean()
        nodes: list[Any] = [get_gradient_edge(parameter).node for parameter in model.parameters()]
        assert not any("seen" in node.metadata for node in nodes)
        for node in nodes:
            node.metadata["seen"] = True
        loss.backward()
        del loss, nodes, node

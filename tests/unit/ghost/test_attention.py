"""MultiheadAttention in every way it is called: gradients of examples equal those of as many passes as examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import one_by_one, recorded
from cdgrab import Ordering
from cdgrab.ghost.records import Matrix, written_out
from cdgrab.hooks.rows import ExampleRows

NUM, LENGTH, WIDTH = 5, 7, 8


class Reader(nn.Module):
    """`look` is given the inputs and tells what attention is called with."""

    def __init__(self, look: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.look = look
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.look(x)
        return self.out(self.attention(*args, **kwargs)[0].mean(1))  # type: ignore[no-any-return]


def itself(**kwargs: Any) -> Any:
    return lambda x: ((x, x, x), {name: make(x) for name, make in kwargs.items()})


def others(x: Tensor) -> Any:
    """Keys and values of other lengths and widths, by name."""
    return (x,), {"key": x[:, 2:, :6], "value": x[:, 2:, 1:]}


def shifted(x: Tensor) -> Any:
    return (x, x.flip(1), x.flip(2)), {"need_weights": False}


def _causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def _by_head(x: Tensor) -> Tensor:
    """A summand for every head of every example."""
    return x[:, :, :LENGTH].repeat_interleave(2, 0)


def _padding(x: Tensor) -> Tensor:
    """Of other lengths for other examples, whatever batch they are in."""
    last = 3 + (x[:, 0, 0] > 0).long()
    return torch.arange(x.shape[1]) > last[:, None]


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "itself": (itself(), {}),
    "no bias": (itself(), {"bias": False}),
    "causal": (itself(attn_mask=_causal), {}),
    "padding": (itself(key_padding_mask=_padding, need_weights=lambda _: False), {}),
    "causal and padding": (itself(attn_mask=_causal, key_padding_mask=_padding), {}),
    "a mask for each head": (itself(attn_mask=_by_head), {}),
    "others": (others, {"kdim": 6, "vdim": 7}),
    "shifted": (shifted, {}),
    "keys of its own": (itself(), {"add_bias_kv": True}),  # served example by example
    "a key of zeros": (itself(), {"add_zero_attn": True}),
}


def reader(name: str) -> tuple[Reader, Tensor, Tensor]:
    torch.manual_seed(3)
    return Reader(*CALLS[name]).double(), randn(NUM, LENGTH, WIDTH, dtype=torch.float64), torch.arange(NUM) % 5


@pytest.mark.parametrize("name", CALLS)
def test_rows(name: str) -> None:
    net, x, y = reader(name)
    expected = one_by_one(net, x, y)
    torch.testing.assert_close(written_out(*recorded(net, x, y)), expected)
    torch.testing.assert_close(ExampleRows(net)(lambda: cross_entropy(net(x), y, reduction="sum"), NUM), expected)


def test_examples_of_several_sequences() -> None:
    net, x, y = reader("padding")
    x, y = x[:4], y[:4]
    expected = []
    for part, targets in zip(x.split(2), y.split(2), strict=True):
        grads = torch.autograd.grad(cross_entropy(net(part), targets, reduction="sum"), list(net.parameters()))
        expected.append(torch.cat([grad.flatten() for grad in grads]))
    found = ExampleRows(net, parts=2)(lambda: cross_entropy(net(x), y, reduction="sum"), 2)
    torch.testing.assert_close(found, torch.stack(expected))


class Weighing(nn.Module):
    """Uses the weights of attention beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH + LENGTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.attention(x, x, x)
        return self.out(torch.cat([found.mean(1), weights.mean(1)], 1))  # type: ignore[no-any-return]


def test_weights_that_are_used() -> None:
    _, x, y = reader("itself")
    torch.manual_seed(3)
    net = Weighing().double()
    torch.testing.assert_close(written_out(*recorded(net, x, y)), one_by_one(net, x, y))


def test_frozen_parts() -> None:
    net, x, y = reader("itself")
    net.attention.in_proj_weight.requires_grad_(False)
    records, _ = recorded(net, x, y)
    assert set(records) == {f"attention.{key}" for key in ("in_proj_bias", "out_proj.weight", "out_proj.bias")} | {
        "out.weight",
        "out.bias",
    }


def test_projections_of_one_input_are_one_matrix() -> None:
    torch.manual_seed(3)
    net = Reader(itself(), {}).double()
    net.attention, net.out = nn.MultiheadAttention(40, 2, batch_first=True).double(), nn.Linear(40, 5).double()
    records, _ = recorded(net, randn(NUM, 3, 40, dtype=torch.float64), torch.arange(NUM))
    assert isinstance(records["attention.in_proj_weight"], Matrix)


def test_the_plan() -> None:
    ordering = Ordering(8, batch_size=2, unit_size=1)
    line = ordering.explain(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))).splitlines()[1]
    # With one position, factors of 24 + 8 and 8 + 8 numbers; it runs forward and back, of three passes.
    assert line.split()[:5] == ["0", "MultiheadAttention", "288", "?", "48"]
    of_weights = (4 * 2**2 * (32 + 16) + 4 * 2 * (192 + 64)) / (6 * 2 * (192 + 64))
    assert line.split()[5] == f"{4 / 6 + of_weights:.2f}x"
    assert "run once more" in line
    own_keys = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True))
    assert "once more for every example" in ordering.explain(own_keys)


def test_a_plan_for_biases_alone() -> None:
    net = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(3, 4, batch_first=True))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bias" in name)
    plan = Ordering(8, batch_size=2, unit_size=1).explain(net).splitlines()
    assert plan[1].split()[4:6] == ["0", "1.00x"]
    assert plan[2].split()[4] == "0"

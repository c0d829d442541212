"""MultiheadAttention in every way it is called: gradients of examples equal those of as many passes as examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _inputs import randn
from _models import factors_of, one_by_one, rows_of
from cdgrab.factors import Matrix
from cdgrab.per_example.plan import make_plan

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


def other_values(x: Tensor) -> Any:
    return (x, x, x.flip(2)), {}


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
    "other values": (other_values, {}),
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
    torch.testing.assert_close(rows_of(net, x, y), expected)


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
    torch.testing.assert_close(rows_of(net, x, y), one_by_one(net, x, y))


def test_frozen_parts() -> None:
    net, x, y = reader("itself")
    net.attention.in_proj_weight.requires_grad_(False)
    records = factors_of(net, x, y)
    assert set(records) == {f"attention.{key}" for key in ("in_proj_bias", "out_proj.weight", "out_proj.bias")} | {
        "out.weight",
        "out.bias",
    }


def test_projections_of_one_input_are_one_matrix() -> None:
    torch.manual_seed(3)
    net = Reader(itself(), {}).double()
    net.attention, net.out = nn.MultiheadAttention(40, 2, batch_first=True).double(), nn.Linear(40, 5).double()
    records = factors_of(net, randn(NUM, 3, 40, dtype=torch.float64), torch.arange(NUM))
    assert isinstance(records["attention.in_proj_weight"][0], Matrix)


def test_projections_are_sketched_from_factors() -> None:
    net = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    assert make_plan(net).matrices == {"0.in_proj_weight", "0.out_proj.weight"}
    own_keys = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True))
    assert make_plan(own_keys).matrices == set()

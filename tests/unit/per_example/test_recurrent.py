"""LSTM, GRU and RNN of every shape: gradients of examples from one pass equal those of as many passes as examples."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import factors_of, one_by_one, rows_of
from cdgrab import Ordering
from cdgrab.factors import Matrix
from cdgrab.per_example.layers import recurrent

NUM = 6
KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
}


class Reader(nn.Module):
    """Classifies sequences by what `uses` says: all outputs, or the state that is left in the first or last layer."""

    def __init__(self, recurrent: Any, uses: str, state: bool = False) -> None:
        super().__init__()
        self.recurrent, self.uses, self.state = recurrent, uses, state
        wide = 2 if uses == "outputs" and recurrent.bidirectional else 1
        self.out = nn.Linear(wide * (recurrent.proj_size or recurrent.hidden_size), 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs, left = self.recurrent(x, **({"hx": self.begin(x)} if self.state else {}))
        hidden = left[0] if isinstance(left, tuple) else left
        chosen = {"outputs": outputs.mean(1), "first": hidden[0], "last": hidden[-1]}[self.uses]
        return self.out(chosen)  # type: ignore[no-any-return]

    def begin(self, x: Tensor) -> Any:
        """A state that depends on the example."""
        r = self.recurrent
        layers = r.num_layers * (1 + r.bidirectional)
        one, other = (
            x.mean((1, 2))[None, :, None].repeat(layers, 1, size)
            for size in (r.proj_size or r.hidden_size, r.hidden_size)
        )
        return (one, 0.5 * other) if isinstance(r, nn.LSTM) else one


def reader(kind: str, shape: str, uses: str, *, state: bool = False) -> Reader:
    torch.manual_seed(2)
    return Reader(KINDS[kind](4, 6, batch_first=True, **SHAPES[shape]), uses, state).double()


def data() -> tuple[Tensor, Tensor]:
    return randn(NUM, 7, 4, dtype=torch.float64), torch.arange(NUM) % 5


@pytest.fixture(params=["with more inputs", "step by step"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these tests are narrow; both ways must do for all of them."""
    monkeypatch.setattr(recurrent, "_NARROW", 10**6 if request.param == "with more inputs" else 0)


@pytest.mark.parametrize("uses", ["outputs", "first", "last"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, shape: str, uses: str) -> None:
    net, (x, y) = reader(kind, shape, uses), data()
    expected = one_by_one(net, x, y)
    torch.testing.assert_close(rows_of(net, x, y), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_given(kind: str) -> None:
    net, (x, y) = reader(kind, "both ways", "outputs", state=True), data()
    expected = one_by_one(net, x, y)
    torch.testing.assert_close(rows_of(net, x, y), expected)


def test_parameters_that_change_and_are_frozen() -> None:
    net, (x, y) = reader("lstm", "two layers", "outputs"), data()
    for _ in range(2):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.5)
        torch.testing.assert_close(rows_of(net, x, y), one_by_one(net, x, y))
    net.recurrent.weight_hh_l0.requires_grad_(False)
    records = factors_of(net, x, y)
    assert "recurrent.weight_hh_l0" not in records
    assert "recurrent.weight_ih_l0" in records


def test_projections_are_differentiated_example_by_example() -> None:
    torch.manual_seed(2)
    net, (x, y) = Reader(nn.LSTM(4, 6, proj_size=3, batch_first=True), "outputs").double(), data()
    torch.testing.assert_close(rows_of(net, x, y), one_by_one(net, x, y))
    net.state = True
    with pytest.raises(ValueError, match=r"LSTM with projections, .* is called with a state"):
        rows_of(net, x, y)


def test_long_layers_are_kept_as_factors() -> None:
    torch.manual_seed(2)
    net, (x, y) = Reader(nn.LSTM(4, 30, batch_first=True), "last").double(), data()
    records = factors_of(net, x, y)
    assert isinstance(records["recurrent.weight_hh_l0"][0], Matrix)


def test_no_random_number_is_drawn() -> None:
    net, (x, y) = reader("lstm", "one layer", "outputs"), data()
    before = torch.random.get_rng_state()
    rows_of(net, x, y)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sequences_that_are_no_batch_are_refused() -> None:
    net, (x, _) = reader("lstm", "one layer", "outputs"), data()
    ordering = Ordering(14, batch_size=7, unit_size=1)
    ordering.attach(net, source="per_example", strict=True)
    packed = nn.utils.rnn.pack_padded_sequence(x[:3], torch.tensor([7, 5, 2]), batch_first=True)
    for sequences in (x[0], packed):
        with pytest.raises(ValueError, match="packed or single sequence"):
            net.recurrent(sequences)
        with torch.no_grad():
            net.recurrent(sequences)  # to evaluate it is fine


@pytest.mark.parametrize("kind", ["lstm", "gru", "attention", "unknown"])
def test_buffers_that_are_filled_again_change_nothing(kind: str) -> None:
    """A pair takes two steps, and what the first has seen must still be there in the second."""

    def order(*, buffered: bool) -> list[int]:
        net = long_net(kind)
        ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=1)
        ordering.attach(net, source="per_example")
        x, y = randn(24, 3, 30, dtype=torch.float64), torch.arange(24) % 5
        buffer = torch.empty(4, 3, 30, dtype=torch.float64)
        for index in torch.from_numpy(ordering.remaining()).split(4):
            buffer = buffer if buffered else torch.empty_like(buffer)
            cross_entropy(net(buffer.copy_(x[index])), y[index]).backward()
        assert ordering.epoch == 1
        return list(ordering.remaining())

    assert order(buffered=True) == order(buffered=False)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """The garbage collector looks at new objects only; going through those of all modules takes half a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("kind", ["lstm", "attention", "unknown"])
def test_nothing_is_kept_of_passes_that_are_over(kind: str) -> None:
    net = long_net(kind)
    ordering = Ordering(16, batch_size=4, unit_size=1, lanes=4)
    ordering.attach(net, source="per_example")
    x, y = randn(4, 3, 30, dtype=torch.float64), torch.arange(4)
    counts = []
    for _ in range(4):  # epochs
        assert len(ordering.order) == 16
        for _ in range(4):
            cross_entropy(net(x), y).backward()
        gc.collect()
        counts.append(sum(type(thing) is Tensor for thing in gc.get_objects()))
    assert len(set(counts[1:])) == 1
    gone = weakref.ref(net)
    ordering.detach()
    del net, ordering
    gc.collect()
    assert gone() is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 30))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x * self.factor, None


class Watched(nn.Module):
    def __init__(self, inner: nn.Module, attends: bool) -> None:
        super().__init__()
        self.inner, self.attends, self.out = inner, attends, nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(*([x] * 3 if self.attends else [x]))[0].mean(1))  # type: ignore[no-any-return]


def long_net(kind: str) -> nn.Module:
    """With so many weights that factors are kept."""
    torch.manual_seed(2)
    if kind == "attention":
        return Watched(nn.MultiheadAttention(30, 2, batch_first=True), True).double()
    return Watched(Scaled() if kind == "unknown" else KINDS[kind](30, 30, batch_first=True), False).double()


class Twice(nn.Module):
    """One layer for both halves, with the state carried over; and a look at it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, 2, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, state = self.lstm(x[:, :4])
        with torch.no_grad():
            self.lstm(x)
        second, _ = self.lstm(x[:, 4:], state)
        return self.out(first.mean(1) + second.mean(1))  # type: ignore[no-any-return]


def test_layers_that_are_used_twice() -> None:
    torch.manual_seed(2)
    net, (x, y) = Twice().double(), data()
    expected = one_by_one(net, x, y)
    torch.testing.assert_close(rows_of(net, x, y), expected)


def test_dropout_that_begins_later_is_refused() -> None:
    net, (x, y) = Reader(nn.LSTM(4, 6, 2, dropout=0.3, batch_first=True), "outputs").double(), data()
    net.eval()
    ordering = Ordering(2 * NUM, batch_size=NUM, unit_size=1)
    ordering.attach(net, source="per_example", strict=True)
    cross_entropy(net(x), y).backward()
    net.train()
    with pytest.raises(ValueError, match=r"layer 'recurrent' \(LSTM\) has dropout inside"):
        net(x)


def test_weights_that_are_tied_within_a_layer() -> None:
    net, (x, y) = reader("lstm", "two layers", "outputs"), data()
    net.recurrent.weight_hh_l1 = net.recurrent.weight_hh_l0
    torch.testing.assert_close(rows_of(net, x, y), one_by_one(net, x, y))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*batching rule.*:UserWarning")
def test_weights_that_are_made_of_others_are_differentiated_example_by_example() -> None:
    net, (x, y) = reader("lstm", "one layer", "outputs"), data()
    nn.utils.weight_norm(net.recurrent, "weight_hh_l0")
    torch.testing.assert_close(rows_of(net, x, y), one_by_one(net, x, y))


def test_rows_under_autocast() -> None:
    net, (x, y) = reader("lstm", "one layer", "outputs").float(), data()
    x = x.float()
    expected = one_by_one(net, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        found = rows_of(net, x, y)
    assert float((found - expected).norm()) < 0.05 * float(expected.norm())

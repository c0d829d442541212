"""What people do in training loops, with gradients of single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from _inputs import randn
from _models import Catching, build, source_of
from cdgrab import Ordering, per_example_grads
from cdgrab.sources import SketchSource


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4)).double()


X, Y = randn(24, 6, dtype=torch.float64), torch.arange(24) % 4


def train(net: nn.Module, ordering: Ordering, epochs: int = 2, **options: Any) -> list[list[int]]:
    """The loop; returns the orders it went through."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=ordering.batch_size, sampler=ordering.sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    orders = []
    for epoch in range(epochs):
        ordering.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if options.get("buffer") is not None:
                options["buffer"][: len(x)] = x
                x = options["buffer"][: len(x)]
            outputs = checkpoint(net, x, use_reentrant=False) if options.get("checkpointed") else net(x)
            cross_entropy(outputs, y).backward()
            if options.get("clip"):
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if options.get("accumulate", 1) == 1 or step % options["accumulate"] == 1:
                optimizer.step()
                optimizer.zero_grad()
            if options.get("evaluate"):
                with torch.no_grad():
                    net(X)
                net(X[:3]).sum()  # nobody calls backward
        orders.append(ordering.order.tolist())
    return orders


def attached(**options: Any) -> list[list[int]]:
    net = model()
    ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=2)
    ordering.attach(net, source="per_example")
    return train(net, ordering, **options)


class Observed(nn.Module):
    """Computes rows with `per_example_grads` and observes them, beside an ordinary forward pass."""

    def __init__(self, net: nn.Module, ordering: Ordering) -> None:
        super().__init__()
        self.net, self.ordering = net, ordering

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([Y[(row == X).all(1)] for row in x])
        self.ordering.observe(per_example_grads(self.net, cross_entropy, x, y))
        return self.net(x)  # type: ignore[no-any-return]


def by_hand(**options: Any) -> list[list[int]]:
    net = model()
    ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=2)
    return train(Observed(net, ordering), ordering, **options)


@pytest.mark.parametrize("options", [{}, {"clip": True}, {"accumulate": 2}], ids=str)
def test_orders_are_those_of_rows(options: dict[str, Any]) -> None:
    assert attached(**options) == by_hand(**options)


def test_evaluation_checkpointing_and_reused_buffers_change_nothing() -> None:
    expected = attached()
    assert attached(evaluate=True) == expected
    assert attached(checkpointed=True) == expected
    assert attached(buffer=torch.zeros(4, 6, dtype=torch.float64)) == expected


def test_autocast() -> None:
    net = model().float()
    ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4)
    ordering.attach(net, source="per_example")
    for start in range(0, 24, 4):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = net(X[start : start + 4].float())
        cross_entropy(outputs.float(), Y[start : start + 4]).backward()
    assert ordering.epoch == 1
    assert sorted(ordering.order.tolist()) == list(range(24))
    assert 0 < ordering.metrics()["imbalance"] < 2


@pytest.mark.parametrize("source", ["per_example", "sketch"])
def test_a_backward_pass_under_autocast_is_looked_at_in_full_precision(source: str) -> None:
    """Whoever calls `backward()` inside gets gradients of half precision; inner products of them are not to be."""

    def found(inside: bool) -> tuple[list[int], float]:
        net = model().float()
        ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4)
        ordering.attach(net, source=source_of(source, 64))
        for start in range(0, 24, 4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(net(X[start : start + 4].float()), Y[start : start + 4])
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        return ordering.order.tolist(), ordering.metrics()["imbalance"]

    assert found(True) == found(False)


def test_sources_agree_and_detach_ends_it() -> None:
    orders = []
    for source in ("sketch", "per_example"):
        net = model()
        ordering = Ordering(24, batch_size=6, unit_size=1, lanes=3)
        ordering.attach(net, source=source_of(source, 256))  # as long as the gradient: nothing is lost
        orders.append(train(net, ordering))
        ordering.detach()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert orders[0] == orders[1]


@pytest.mark.parametrize("source", ["per_example", "sketch"])
@pytest.mark.parametrize("steps", [1, 2, 5, 7])
def test_resume_in_the_middle(steps: int, source: str) -> None:
    def fresh() -> tuple[nn.Module, Ordering]:
        net = model()
        ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=2)
        ordering.attach(net, source=source_of(source, 64))
        return net, ordering

    def step(net: nn.Module, ordering: Ordering) -> None:
        batch = torch.from_numpy(ordering.remaining()[:4])
        cross_entropy(net(X[batch]), Y[batch]).backward()

    net, straight = fresh()
    for _ in range(steps):
        step(net, straight)
    other, resumed = fresh()
    resumed.load_state_dict(straight.state_dict())
    for _ in range(12):
        step(net, straight)
        step(other, resumed)
    assert straight.order.tolist() == resumed.order.tolist()
    figures = [{**ordering.metrics(), "seconds": 0} for ordering in (straight, resumed)]
    assert figures[0] == figures[1]


def test_a_backward_pass_that_breaks_off_leaves_nothing_behind() -> None:
    net = model()
    ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=2)
    ordering.attach(net, source="per_example")
    hidden = net[0](X[:4])  # type: ignore[index]
    hidden.register_hook(_raise)
    with pytest.raises(RuntimeError, match="broken"):
        net[2](hidden).sum().backward()  # type: ignore[index]
    assert train(net, ordering) == attached()


def _raise(_: Tensor) -> None:
    raise RuntimeError("broken")


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.inner = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Loose(), r"shift cannot be balanced: the model \(Loose\) has layers inside and uses these itself"),
        (nn.Sequential(nn.LSTM(3, 3)), r"layer '0' \(LSTM\) has batch_first=False; make it with batch_first=True"),
        (nn.Sequential(nn.MultiheadAttention(4, 2, 0.1, batch_first=True)), "layer '0'.*has dropout inside"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
    ],
)
def test_models_that_cannot_be_served(net: nn.Module, message: str) -> None:
    ordering = Ordering(8, batch_size=4, unit_size=1)
    with pytest.raises(ValueError, match=message):
        ordering.attach(net, source="per_example", strict=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_refused() -> None:
    compiled: Any = torch.compile(model())
    with pytest.raises(ValueError, match=r"(?s)no trained parameter can be balanced; use source='batch'.*is compiled"):
        Ordering(8, batch_size=4, unit_size=1).attach(compiled, source="per_example")


def test_bad_arguments() -> None:
    ordering = Ordering(8, batch_size=4, unit_size=1)
    for arguments, message in [
        ({"source": "magic"}, "unknown source 'magic'; choose one of auto, batch, per_example, sketch"),
        ({"source": "ghost"}, "source 'ghost' is gone: use 'sketch'.* or 'per_example'"),
        ({"source": "per_example", "reduction": "none"}, "reduction is 'none'; pass the reduction of the loss"),
        ({"source": "sketch", "length": 100}, "length is 100; choose a power of two, 16 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            ordering.attach(model(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit_size is 4; make the ordering with unit_size=1"):
        Ordering(8, batch_size=4, unit_size=4).attach(model(), source="per_example")
    ordering.observe(randn(4, 3))
    with pytest.raises(ValueError, match=r"4 rows of this epoch have been observed already"):
        ordering.attach(model(), source="sketch")


def test_batches_that_do_not_come_first() -> None:
    net = nn.Linear(6, 4)
    ordering = Ordering(8, batch_size=4, unit_size=1)
    ordering.attach(net, source="per_example")
    with pytest.raises(
        ValueError, match=r"(?s)no trained.*the model \(Linear\) has outputs of shape \(7, 4, 4\).*batch_first"
    ):
        net(torch.randn(7, 4, 6)).sum().backward()


class InPlace(nn.Module):
    """Views that are changed in place, keywords, and a layer used through its weight if `loose`."""

    def __init__(self, *, loose: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.loose = nn.Linear(6, 6), nn.Linear(6, 4), loose

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(input=x[:, None].expand(-1, 3, -1))
        hidden += 1
        hidden = torch.relu_(hidden)
        if self.loose:
            hidden = nn.functional.linear(hidden, self.one.weight)
        return self.two(hidden).mean(1)  # type: ignore[no-any-return]


def test_operations_in_place_after_a_layer() -> None:
    orders = []
    for source in ("attached", "rows"):
        torch.manual_seed(0)
        net = InPlace().double()
        ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=2)
        if source == "attached":
            ordering.attach(net, source="per_example")
        orders.append(train(net if source == "attached" else Observed(net, ordering), ordering))
    assert orders[0] == orders[1]


def test_a_weight_used_outside_of_its_layer_is_found_out() -> None:
    net = InPlace(loose=True).double()
    ordering = Ordering(24, batch_size=4, unit_size=1)
    ordering.attach(net, source="per_example", strict=True)
    with pytest.raises(ValueError, match=r"one.weight cannot be balanced: .* do not add up to that of the batch"):
        cross_entropy(net(X[:4]), Y[:4]).backward()


class Keys(nn.Module):
    """The bias of the keys has no gradient but for rounding: it shifts all scores of a query alike."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.linspace(0.1, 2, 9)[:, None]
        scores = torch.softmax(self.query(x) @ self.key(x).mT, dim=-1)
        return (scores @ self.value(x)).sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_gradients_of_nothing_but_rounding_are_no_alarm(scale: float) -> None:
    torch.manual_seed(0)
    net = Keys()
    ordering = Ordering(24, batch_size=8, unit_size=1)
    ordering.attach(net, source="per_example")
    (scale * cross_entropy(net(X[:8].float()), Y[:8])).backward()
    bias, weight = net.key.bias.grad, net.key.weight.grad
    assert bias is not None and weight is not None  # noqa: PT018
    assert 0 < float(bias.norm()) < 1e-4 * float(weight.norm())
    assert len(ordering.remaining()) == 16


@pytest.mark.parametrize("length", [21, 22, 23, 24])
def test_uneven_workers_with_several_turns_in_a_step(length: int) -> None:
    orders = []
    for source in ("sketch", "per_example"):
        net = model()
        ordering = Ordering(length, batch_size=8, unit_size=1, lanes=2)
        ordering.attach(net, source=source_of(source, 256))  # as long as the gradient: nothing is lost
        while ordering.epoch < 2:
            batch = torch.from_numpy(ordering.remaining()[:8])
            cross_entropy(net(X[batch]), Y[batch]).backward()
        orders.append([order.tolist() for order in ordering.orders])
    assert orders[0] == orders[1]


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out, self.calls = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out((self.a if self.calls % 2 else self.b)(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("source", ["per_example", "sketch"])
def test_layers_that_are_not_always_used(source: str) -> None:
    net = Alternating().double()
    ordering = Ordering(24, batch_size=3, unit_size=1)
    ordering.attach(net, source=source_of(source, 64))
    while ordering.epoch < 2:
        batch = torch.from_numpy(ordering.remaining()[:3])
        cross_entropy(net(X[batch]), Y[batch]).backward()
    assert sorted(ordering.order.tolist()) == list(range(24))


def test_identical_examples_and_a_rule_that_takes_roots() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 4))
    ordering = Ordering(64, batch_size=8, unit_size=1, rule="halving", lanes=4)
    ordering.attach(net, source="per_example")
    x = X[:1].float().expand(64, -1) + 1e-7 * randn(64, 6)
    while ordering.epoch < 1:
        cross_entropy(net(x[ordering.remaining()[:8]]), torch.zeros(8, dtype=torch.long)).backward()
    assert sorted(ordering.order.tolist()) == list(range(64))


@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_autocast_with_layers_that_are_differentiated_once_more(kind: str) -> None:
    net, x, y = build(kind, 8, torch.float32)
    ordering = Ordering(8, batch_size=4, unit_size=1)
    ordering.attach(net, source="per_example")
    for part in (slice(0, 4), slice(4, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = net(x[part])
        cross_entropy(outputs.float(), y[part]).backward()
    assert ordering.epoch == 1


def test_a_pass_that_breaks_off_does_not_end_observing() -> None:
    net = model()
    ordering = Ordering(24, batch_size=4, unit_size=4)
    ordering.attach(net)
    hidden = net[0](X[:4])  # type: ignore[index]
    hidden.register_hook(_raise)
    with pytest.raises(RuntimeError, match="broken"):
        net[2](hidden).sum().backward()  # type: ignore[index]
    cross_entropy(net(X[:4]), Y[:4]).backward()
    assert len(ordering.remaining()) == 20


@pytest.mark.parametrize("source", ["per_example", "sketch"])
@pytest.mark.parametrize("name", ["mlp", "unknown"])
def test_a_loss_that_is_kept_keeps_nothing_else(name: str, source: str) -> None:
    """PyTorch frees what a graph was made for after the backward pass, whoever keeps the loss; so do hooks."""
    model, x, y = build(name, 24)
    ordering = Ordering(len(x), batch_size=6, unit_size=1, lanes=6)
    ordering.attach(model, source=source)
    inputs: list[StorageWeakRef] = []

    def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG001
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    list(model.children())[-1].register_forward_hook(note)
    losses = []
    for batch in torch.arange(24).split(6):
        losses.append(cross_entropy(model(x[batch]), y[batch]))
        losses[-1].backward()
    assert len(inputs) == 4
    assert ordering.epoch == 1  # so that nobody waits for a partner
    del ordering
    assert [reference.expired() for reference in inputs] == [True] * 4


@pytest.mark.parametrize("name", ["mlp", "unknown"])
def test_a_graph_that_is_kept_counts_once(name: str) -> None:
    model, x, y = build(name, 6)
    ordering = Ordering(12, batch_size=6, unit_size=1, lanes=6)
    source = Catching(SketchSource())
    ordering.attach(model, source=source)
    attachment = source.attachment
    attachment._before_forward()  # of another model, for instance
    loss = cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    attachment._before_forward()
    with pytest.raises(ValueError, match="second backward pass"):
        loss.backward()
    assert len(source.rows) == 1


@pytest.mark.parametrize("source", ["per_example", "sketch"])
def test_a_graph_that_is_used_up_is_an_error(source: str) -> None:
    model, x, _ = build("mlp", 6)
    ordering = Ordering(12, batch_size=6, unit_size=1, lanes=6)
    ordering.attach(model, source=source)
    outputs = model(x)
    outputs.mean().backward()
    model(x)  # so that it is not the number of passes that is wrong
    with pytest.raises(RuntimeError, match="goes through layer '2'"):
        outputs.mean().backward()


@pytest.mark.parametrize("source", ["sketch", "per_example"])
def test_a_tensor_between_layers_may_be_asked_about_first(source: str) -> None:
    """Its gradient is found without going on to the layer, which the pass that comes later needs yet."""
    model, x, y = build("mlp", 6)
    ordering = Ordering(12, batch_size=6, unit_size=1, lanes=6)
    ordering.attach(model, source=source)
    for _ in range(2):
        h = model[0](x)  # type: ignore[index]
        out = model[2](model[1](h))  # type: ignore[index]
        torch.autograd.grad(h.square().sum(), h)
        cross_entropy(out, y).backward()
    assert ordering.epoch == 1


@pytest.mark.parametrize("source", ["per_example", "sketch"])
def test_inputs_that_are_views_of_what_is_trained_are_as_they_were(source: str) -> None:
    def orders(copied: bool) -> list[list[int]]:
        torch.manual_seed(1)
        mix, out = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()
        prompt = randn(6, seed=3).double().requires_grad_()  # is no parameter of what is attached
        ordering = Ordering(24, batch_size=4, unit_size=1, lanes=4, seed=2)
        ordering.attach(nn.ModuleList([mix, out]), source=source_of(source, 64))
        found = []
        for _ in range(18):
            batch = torch.from_numpy(ordering.remaining()[:4])
            asked = prompt.expand(4, -1)
            cross_entropy(out(torch.tanh(mix(asked.clone() if copied else asked) + X[batch])), Y[batch]).backward()
            with torch.no_grad():
                prompt.neg_()
            found.append(ordering.order.tolist())
        return found

    assert orders(copied=False) == orders(copied=True)

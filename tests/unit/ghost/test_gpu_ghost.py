"""Single examples on a GPU: what `attach` finds there is what it finds on the CPU. Skipped without a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _inputs import randn
from _models import MODELS, build, one_by_one, recorded
from _sketches import sketches
from _tied import check_tied_table
from cdgrab import Ordering, World
from cdgrab.balance.rules import Greedy
from cdgrab.ghost.outer import outer_sums
from cdgrab.ghost.pairs import Pairs, ReplayedPairs, RunningSum, balance, difference, replayable
from cdgrab.ghost.passes import Pass, Seen
from cdgrab.ghost.records import Lookup, Matrix, Pair, written_out
from cdgrab.hooks import later, replayed, rows
from cdgrab.hooks.rows import ExampleRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MODELS_ON_GPU = list(MODELS)


@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_rows(name: str) -> None:
    model, x, y = build(name, 6)
    expected = one_by_one(model, x, y)
    found = written_out(*recorded(model.cuda(), x.cuda(), y.cuda()))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_rows_of_a_pass_that_stops_at_the_layers(name: str) -> None:
    model, x, y = build(name, 6)
    expected = one_by_one(model, x, y)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    found = ExampleRows(model)(lambda: cross_entropy(model(x), y), 6)
    torch.testing.assert_close(6 * found.cpu(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("words", [5, 80])
@pytest.mark.parametrize("many", [0, 1 << 27])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_with_several_uses(
    dtype: torch.dtype, many: int, words: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_MANY", many)
    monkeypatch.setattr(rows, "_LARGE", 0)
    check_tied_table(words, answers, "cuda", dtype)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 7, 130), (2, 100, 33), (1, 300, 128)])
def test_lookups_as_rows(shape: tuple[int, int, int], turned: bool) -> None:
    """Tokens that repeat are added up; what lies beside the rows is not touched; twice is the same to the bit."""
    num, positions, width = shape
    index = torch.randint(11, (num, positions), generator=torch.Generator().manual_seed(1))
    lookup = Lookup(index, randn(num, positions, width), 13)
    before = randn(num, 13 * width + 9)
    expected = before.double()
    added = Lookup(index, lookup.b_NTq.double(), 13).rows()
    expected[:, 4:-5] += added.view(num, 13, width).mT.flatten(1) if turned else added
    twice = []
    for _ in range(2):
        there = before.cuda()
        Lookup(index.cuda(), lookup.b_NTq.cuda(), 13).add_rows(there[:, 4:-5], turned=turned)
        twice.append(there.cpu())
    torch.testing.assert_close(twice[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(twice[0], twice[1])


def train(model: nn.Module, x: Tensor, y: Tensor, source: str) -> list[list[int]]:
    ordering = Ordering(len(x), batch_size=6, unit_size=1, world=World.simulated(3), seed=1)
    ordering.attach(model, source=source, length=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    orders = []
    for epoch in range(3):
        ordering.sampler.set_epoch(epoch)
        for batch in torch.tensor(list(ordering.sampler)).split(6):
            here = batch.to(x.device)
            cross_entropy(model(x[here]), y[here]).backward()
            optimizer.step()
            optimizer.zero_grad()
        orders.append(ordering.order.tolist())
    return orders


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-9, 1e-12), (torch.float32, 1e-3, 1e-5)])
@pytest.mark.parametrize(("room", "little"), [(1, 0), (1 << 25, 0), (1 << 25, 1 << 24)])
@pytest.mark.parametrize("name", ["mlp", "lenet", "tied", "used twice", "normed", "lstm"])
def test_replayed_sketches(
    name: str, room: int, little: int, dtype: torch.dtype, rtol: float, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later, "room_for", lambda grad: room)
    monkeypatch.setattr(replayed, "_LITTLE", little)
    # Where tensors come to lie is nobody's promise; those that have moved twice are copied.
    monkeypatch.setattr(replayed, "_MOST_MOVES", 2)
    replays: list[int] = []
    replay = replayed.Recording.__call__

    def noted(self: replayed.Recording, seen: list[Seen]) -> None:
        replays.append(len(seen))
        replay(self, seen)

    monkeypatch.setattr(replayed.Recording, "__call__", noted)
    expected, _ = sketches(name, replays=False, device="cuda", dtype=dtype)
    assert not replays
    found, _ = sketches(name, replays=True, device="cuda", dtype=dtype)
    assert replays
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer"])
def test_sketches_of_tensors_that_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(10**6))
    monkeypatch.setattr(replayed, "places", lambda seen: next(steps))
    monkeypatch.setattr(replayed, "_MOST_MOVES", 2)
    monkeypatch.setattr(replayed, "_LITTLE", 0)
    expected, _ = sketches(name, replays=False, device="cuda")
    found, recordings = sketches(name, replays=True, device="cuda")
    assert recordings > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


SIDES = [(7, 3, 200, 9), (1, None, 300, 40), (33, 20, 64, None), (70, 64, 5, 2)]


@pytest.mark.parametrize(("num", "positions"), [(5, 1), (130, 1), (3, 7), (4, 20), (3, 100), (600, 40), (2, 5000)])
@pytest.mark.parametrize(("q", "m", "p", "k"), [*SIDES, (700, 3, 520, 9), (1, None, 900, 4)])
@pytest.mark.parametrize("across", [False, True])
def test_outer_sums(num: int, positions: int, q: int, m: int | None, p: int, k: int | None, across: bool) -> None:
    """Sums of outer products of projected vectors, laid out along positions or across them, against plain PyTorch."""
    b, a = randn(num, positions, q), randn(num, positions, p, seed=1)
    left, right = (None if rows is None else randn(rows, width, seed=2) for rows, width in ((m, q), (k, p)))
    left_there, right_there = (None if side is None else side.cuda() for side in (left, right))
    there = [part.mT.contiguous().cuda().mT if across else part.cuda() for part in (b, a)]
    found = outer_sums(there[0], left_there, there[1], right_there)
    exact = outer_sums(
        b.double(), None if left is None else left.double(), a.double(), None if right is None else right.double()
    )
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))


def test_sketches_take_no_second_workspace() -> None:
    """Of the library for matrix products, which takes 32 MiB for every stream it sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    ordering = Ordering(10**4, batch_size=32, unit_size=1, world=World.simulated(32))
    x, y = torch.randn(32, 64).cuda(), torch.randint(10, (32,)).cuda()
    cross_entropy(model(x), y).backward()  # the stream of the steps has one
    ordering.attach(model, source="sketch", fitted=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        cross_entropy(model(x), y).backward()
    attachment: Any = ordering._attachment
    assert attachment.replays._recorded
    assert torch.cuda.memory_allocated() - before < 1 << 24


@pytest.mark.parametrize("source", ["ghost", "per_example", "sketch"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "tied"])
def test_orders(name: str, source: str) -> None:
    model, x, y = build(name, 26)
    expected = train(model, x, y, source)
    model, x, y = build(name, 26)
    assert train(model.cuda(), x.cuda(), y.cuda(), source) == expected


@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer", "tied", "attention"])
@pytest.mark.parametrize(("workers", "batch"), [(5, 5), (3, 6), (70, 70)])
def test_orders_from_records(name: str, workers: int, batch: int) -> None:
    """Turns of one example each are replayed; 70 pairs are several blocks."""
    orders = []
    for device in ("cpu", "cuda"):
        model, x, y = build(name, 9 * workers + 2)
        model, x, y = model.to(device), x.to(device), y.to(device)
        ordering = Ordering(len(x), batch_size=batch, unit_size=1, world=World.simulated(workers), seed=1)
        ordering.attach(model, source="ghost")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for epoch in range(3):
            ordering.sampler.set_epoch(epoch)
            for index in torch.tensor(list(ordering.sampler)).split(batch):
                here = index.to(device)
                cross_entropy(model(x[here]), y[here]).backward()
                optimizer.step()
                optimizer.zero_grad()
        if device == "cuda" and workers == batch:
            assert ordering._sorter._replayed is not None  # type: ignore[union-attr]
        orders.append([order.tolist() for order in ordering.orders])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", MODELS_ON_GPU)
def test_replayed_pairs(name: str, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision, on records other than those they were recorded with, against one table on a CPU."""
    monkeypatch.setattr("cdgrab.ghost.pairs._rows_at_a_time", lambda *_: 4 if rows else 0)
    model, x, y = build(name, 24, torch.float32)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    batches = [recorded(model, x[i : i + 6], y[i : i + 6])[0] for i in range(0, 24, 6)]
    turns = [Pass.of(batch) for batch in batches]
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    here, there = RunningSum(), RunningSum()
    here.make_room(batches[0], shapes)
    there.load({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})
    assert replayable(turns[0], turns[1], here)
    replayed = ReplayedPairs(turns[0], turns[1], here, Greedy())
    found = [replayed.balance()]
    replayed.record()
    steps = ((0, 1), (2, 3), (1, 2))
    for first, second in steps[1:]:
        assert replayed.take_first(turns[first])
        decided = replayed.take_second(turns[second])
        assert decided is not None
        found.append(decided)
    for (first, second), decided in zip(steps, found, strict=True):
        exact = [
            {
                key: record.like(tuple(t.cpu().double() if t.is_floating_point() else t.cpu() for t in record.tensors))
                for key, record in batches[number].items()
            }
            for number in (first, second)
        ]
        expected = balance(Pairs(difference(*exact), there), Greedy())
        torch.testing.assert_close(decided[:2].cpu(), expected[:2])
        torch.testing.assert_close(decided[2:].cpu(), expected[2:], rtol=1e-3, atol=1e-4)
    for key, part in here.parts.items():
        torch.testing.assert_close(part.cpu().double(), there.parts[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most", [1 << 26, 100])
def test_products_of_long_sequences(dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdgrab.ghost.records.MOST_NUMBERS_ON_GPU", most)
    wide = [
        Matrix(randn(20, 40, 7, seed=seed, dtype=torch.float64), randn(20, 40, 11, seed=seed + 1, dtype=torch.float64))
        for seed in (0, 2)
    ]
    rows, r = wide[0].rows() - wide[1].rows(), randn(11, 7, dtype=torch.float64)
    here = (part.like(tuple(tensor.to("cuda", dtype) for tensor in part.tensors)) for part in wide)
    pair = Pair(*here)
    assert not pair.prefers_factors()
    gram, dots = pair.products(r.to("cuda", dtype))
    tolerance = 1e-10 if dtype == torch.float64 else 2e-6
    for found, expected in ((gram, rows @ rows.T), (dots, rows @ r.flatten())):
        assert float((found.cpu().double() - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.parametrize(
    ("source", "name"), [("ghost", "lenet"), ("ghost", "tied"), ("per_example", "lenet"), ("sketch", "lenet")]
)
def test_nothing_waits_for_the_device(source: str, name: str) -> None:
    """After the first batch, which is held against the gradient of `backward()`."""
    model, x, y = build(name, 64, torch.float32)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    ordering = Ordering(64 * 9, batch_size=8, unit_size=1, world=World.simulated(8))
    ordering.attach(model, source=source, fitted=False)
    ready = 4 if source == "ghost" else 2  # pairs have been recorded by then
    for step in range(9):
        torch.cuda.set_sync_debug_mode("error" if step > ready else "default")
        try:
            cross_entropy(model(x[:8]), y[:8]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

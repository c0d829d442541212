"""`attach` under DistributedDataParallel: the orders of one process, the averages of plain DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from _inputs import randn
from cdgrab import ORDERS, Ordering, World, flat_grad
from distributed._ranks import run_ranks, start_ranks

LENGTH, BATCH, EPOCHS = 53, 4, 3
X, Y = randn(LENGTH, 6), torch.arange(LENGTH) % 3


class Net(nn.Module):
    """Sizes that no number of ranks divides, a frozen layer, and a branch that is not always used."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 11, dtype=dtype)
        self.frozen = nn.Linear(11, 11, dtype=dtype).requires_grad_(False)
        self.second = nn.Linear(11, 7, dtype=dtype)
        self.last = nn.Linear(7, 3, dtype=dtype)
        self.branch = nn.Linear(11, 7, dtype=dtype) if branch else None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        other = self.branch is not None and self.calls % 2 == 0
        output: Tensor = self.last(torch.tanh((self.branch if other and self.branch else self.second)(hidden)))
        return output


def loss_of(model: nn.Module, batch: list[int]) -> Tensor:
    return nn.functional.cross_entropy(model(X[batch]).double(), Y[batch])


def train(ordering: Ordering, model: nn.Module, epochs: int = EPOCHS, accumulate: int = 1) -> list[list[int]]:
    """Orders after each epoch, and at the end the parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    orders = []
    for epoch in range(epochs):
        batches = torch.tensor(list(ordering.sampler)).split(BATCH)
        for step, batch in enumerate(batches):
            if (step + 1) % accumulate and step + 1 < len(batches):
                assert isinstance(model, DistributedDataParallel)
                with model.no_sync():
                    loss_of(model, batch.tolist()).backward()
                continue
            loss_of(model, batch.tolist()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert ordering.epoch == epoch + 1
        orders.append(ordering.order.tolist())
    return orders


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def simulated(size: int, order: str = "cd-grab", rule: str = "greedy") -> tuple[list[list[list[int]]], Tensor]:
    """The same training in one process: a step is the mean of the gradients of all ranks' batches.

    A unit is a rank's batch. So the one that decides orders the numbers of units, a lane for each rank.
    """
    ranks = [
        Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH, order=order, world=World(rank, size))
        for rank in range(size)
    ]
    balanced = ORDERS[order].needs_gradients
    num_units = len(ranks[0].order) // BATCH if balanced else 0
    units = [rank.order.split(BATCH) for rank in ranks]
    deciding = Ordering(max(1, size * num_units), batch_size=size, unit_size=1, lanes=size, order=order, rule=rule)
    first = [order.tolist() for order in deciding.orders]
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    orders = []
    for epoch in range(EPOCHS):
        for rank in ranks:
            rank.set_epoch(epoch)
        batches = [list(torch.tensor(list(rank.sampler)).split(BATCH)) for rank in ranks]
        for step in range(len(batches[0])):
            if step < num_units:
                now = [first[lane].index(int(order[step])) for lane, order in enumerate(deciding.orders)]
                parts = [units[lane][number] for lane, number in enumerate(now)]
            else:
                parts = [mine[step] for mine in batches]
            rows = torch.stack([row_of(model, part) for part in parts])
            start = 0
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = rows.mean(0)[start : start + p.numel()].view_as(p)
                    start += p.numel()
            optimizer.step()
            if step < num_units:
                deciding.observe(rows)
        for rank in ranks:
            rank.set_epoch(epoch + 1)
        if balanced:
            numbers = [[first[lane].index(one) for one in order.tolist()] for lane, order in enumerate(deciding.orders)]
            orders.append([torch.cat([units[lane][n] for n in mine]).tolist() for lane, mine in enumerate(numbers)])
        else:
            orders.append([rank.order.tolist() for rank in ranks])
    return orders, flat(model)


def row_of(model: nn.Module, batch: Tensor) -> Tensor:
    model.zero_grad()
    loss_of(model, batch.tolist()).backward()
    return flat_grad(model)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    {"static_graph": True, "bucket_cap_mb": 0.0005},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.0001},
]
KINDS = [
    ("cd-grab", "greedy", "sharded"),
    ("cd-grab", "walk", "gather"),
    ("grab", "greedy", None),
    ("pair", "greedy", None),
    ("rr", "greedy", None),
]


def attached_runs() -> list[tuple[list[list[int]], Tensor]]:
    runs = []
    for options in OPTIONS:
        model = DistributedDataParallel(Net(), **options)
        ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
        ordering.attach(model)
        runs.append((train(ordering, model), flat(model)))
    for order, rule, exchange in KINDS:
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
        ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH, order=order, rule=rule, exchange=exchange)
        ordering.attach(model)
        runs.append((train(ordering, model), flat(model)))
    return runs


@pytest.mark.parametrize("size", [2, 4])
def test_ddp_finds_the_orders_of_the_simulation_and_the_same_model(size: int) -> None:
    """Several buckets, rebuilt after the first step, uneven shards, a short last batch."""
    answers = run_ranks(size, attached_runs)
    cases = [("cd-grab", "greedy")] * len(OPTIONS) + [(order, rule) for order, rule, _ in KINDS]
    for index, (order, rule) in enumerate(cases):
        orders, parameters = simulated(size, order, rule)
        for rank, runs in enumerate(answers):
            found, model = runs[index]
            assert found == [epoch[rank] for epoch in orders], (index, order, rule, rank)
            torch.testing.assert_close(model, parameters)


def averages(dtype: torch.dtype) -> list[float]:
    """How far the gradients of an attached model are from those of plain DDP, in units of the rounding error.

    A mean of `W` numbers, however it is summed, is off by at most `(W + 1) eps` times the mean of their sizes.
    """
    alone = Net(dtype)
    plain, attached = (DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.0005) for _ in range(2))
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(attached)
    found = []
    for step in range(6):
        batch = [(7 * step + 3 * dist.get_rank() + i) % LENGTH for i in range(BATCH)]
        if step == 4:
            left = ordering.examples_left
            ordering.detach()
        for model in (alone, plain, attached):
            model.zero_grad()
            loss_of(model, batch).backward()
        size = flat_grad(alone).double().abs()
        dist.all_reduce(size)
        bound = 2 * (dist.get_world_size() + 1) * torch.finfo(dtype).eps * size / dist.get_world_size()
        found.append(float(((flat_grad(plain) - flat_grad(attached)).double().abs() / bound.clamp(min=1e-300)).max()))
    assert ordering.examples_left == left == LENGTH // 3 + 1 - 4 * BATCH
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_average_is_that_of_plain_ddp_attached_and_detached(dtype: torch.dtype) -> None:
    for errors in run_ranks(3, averages, dtype):
        assert max(errors) <= 1


HALVES = (40_000 + 20_000 * torch.rand(3, 101, generator=torch.Generator().manual_seed(0))).half()


def mean_of_halves() -> Tensor:
    """Gradients that are these numbers: the sum of two of them is more than half precision can hold."""
    model = DistributedDataParallel(nn.Linear(101, 1, bias=False, dtype=torch.float16))
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model)
    model(HALVES[dist.get_rank()][None]).sum().backward()
    return flat_grad(model)


@pytest.mark.parametrize("size", [2, 3])
def test_means_of_half_precision_are_rounded_once(size: int) -> None:
    for mean in run_ranks(size, mean_of_halves):
        assert torch.equal(mean, HALVES[:size].double().mean(0).half())


def half_precision() -> list[list[int]]:
    model = DistributedDataParallel(Net(torch.bfloat16))
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model)
    orders = train(ordering, model, epochs=2)
    assert all(stored.rows_Lc.dtype == torch.float32 for stored in ordering._epochs.intake.sorter.store.values())  # type: ignore[union-attr]
    return orders


def test_half_precision_gradients_are_balanced_in_single() -> None:
    answers = run_ranks(2, half_precision)
    assert sorted(answers[0][0] + answers[1][0]) == sorted(set(answers[0][0] + answers[1][0]))


def with_a_hook() -> tuple[bool, list[list[int]]]:
    model = DistributedDataParallel(Net(torch.float32), bucket_cap_mb=0.0005)
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model, source="batch", hook=fp16_compress_hook)
    loss_of(model, [dist.get_rank()]).backward()
    rounded = bool(torch.equal(flat_grad(model), flat_grad(model).half().float()))
    return rounded, [ordering.order.tolist()]


def test_around_a_hook_of_the_user() -> None:
    assert all(rounded for rounded, _ in run_ranks(2, with_a_hook))


def accumulated() -> list[list[int]]:
    model = DistributedDataParallel(Net())
    ordering = Ordering(48, batch_size=BATCH, unit_size=3 * BATCH)
    ordering.attach(model)
    return train(ordering, model, accumulate=3)


def test_accumulated_batches_are_one_unit() -> None:
    for rank, orders in enumerate(run_ranks(2, accumulated)):
        first = Ordering(48, batch_size=BATCH, unit_size=3 * BATCH, world=World(rank, 2)).order.view(-1, 12).tolist()
        for order in orders:
            units = torch.tensor(order).view(-1, 12).tolist()
            assert sorted(units) == sorted(first)


def fresh() -> tuple[Ordering, DistributedDataParallel]:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model)
    return ordering, model


def steps(ordering: Ordering, model: nn.Module, count: int) -> list[list[int]]:
    seen = []
    for _ in range(count):
        model.zero_grad()
        loss_of(model, ordering.remaining()[:BATCH].tolist()).backward()
        seen.append(ordering.order.tolist())
    return seen


def resumed(stop: int) -> bool:
    """A new process has buckets of its own: what was saved must move into them."""

    straight, model = fresh()
    steps(straight, model, stop)
    state = straight.state_dict()
    expected = steps(straight, model, 20)
    ordering, model = fresh()
    ordering.load_state_dict(state)
    return steps(ordering, model, 20) == expected


@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_resume_leaves_no_trace_under_ddp(stop: int) -> None:
    assert run_ranks(3, resumed, stop) == [True] * 3


def attached_twice() -> list[list[list[int]]]:
    """Orders of an ordering that is attached throughout, and of one that is detached and attached again."""
    found = []
    for again in (False, True):
        ordering, model = fresh()
        seen = steps(ordering, model, 6)
        if again:
            ordering.detach()
            ordering.attach(model)
        found.append([*seen, *steps(ordering, model, 14)])
    return found


def test_a_model_may_be_attached_again() -> None:
    for throughout, again in run_ranks(2, attached_twice):
        assert throughout == again


def refusals() -> list[str]:
    messages = []

    def refused(ordering: Ordering, model: nn.Module, **options: Any) -> None:
        try:
            ordering.attach(model, **options)
        except ValueError as error:
            messages.append(str(error))

    model = DistributedDataParallel(Net())
    refused(Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH), Net())
    refused(Ordering(LENGTH, batch_size=BATCH, unit_size=1), model, source="batch")
    refused(Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH), Net(), source="batch", hook=fp16_compress_hook)
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model)
    refused(ordering, model)
    refused(Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH), model)
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, fp16_compress_hook)
    refused(Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH), hooked)
    try:
        ordering.observe(torch.zeros(3))
    except ValueError as error:
        messages.append(str(error))
    dist.barrier()  # rank 0 must not be gone while the other still makes its last group
    return messages


def test_what_cannot_be_served_is_refused_with_the_reason() -> None:
    expected = [
        "Net is not wrapped, but there are 2 ranks; wrap it in DistributedDataParallel",
        "unit_size is 1, but a backward pass gives one gradient for the whole batch of 4",
        "hook= is for DistributedDataParallel; Net has no communication hook",
        "the ordering is attached to a model already",
        "another ordering is attached to the model",
        "the model has a communication hook already",
        "the ordering is attached to a model, whose gradients it observes",
    ]
    for messages in run_ranks(2, refusals):
        assert len(messages) == len(expected)
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)


def nan_on_one_rank() -> tuple[float, list[int]]:
    model = DistributedDataParallel(Net())
    ordering = Ordering(32, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model)
    for step in range(4):
        model.zero_grad()
        loss = loss_of(model, [4 * dist.get_rank() + i for i in range(4)])
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("nan")
        loss.backward()
    return ordering.metrics()["nonfinite"], ordering.order.tolist()


def test_a_nan_on_one_rank_is_left_out_everywhere() -> None:
    answers = run_ranks(2, nan_on_one_rank)
    assert [count for count, _ in answers] == [1, 1]


def raises_in_the_middle() -> None:
    model = DistributedDataParallel(Net())
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(model)
    for step, batch in enumerate(torch.tensor(list(ordering.sampler)).split(BATCH)):
        if step == 3 and dist.get_rank() == 1:
            raise OSError("disk full")
        loss_of(model, batch.tolist()).backward()


def test_a_rank_that_raises_takes_the_others_down_within_the_time_out() -> None:
    (_, survivor), (_, dead) = start_ranks(2, raises_in_the_middle, timeout=10)
    assert dead is not None
    assert "disk full" in dead
    assert survivor is not None
    assert "no answer" not in survivor


def different_models() -> None:
    model = Net(branch=dist.get_rank() == 1)
    ordering = Ordering(LENGTH, batch_size=BATCH, unit_size=BATCH)
    ordering.attach(DistributedDataParallel(model))


def test_different_models_are_an_error_on_every_rank() -> None:
    for _, error in start_ranks(2, different_models, timeout=10):
        assert error is not None
        assert "no answer" not in error

"""Any sequence of observe / iterate / break off / save / load keeps what must always hold."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from _asserts import assert_permutation
from cdgrab import ORDERS, RULES, Ordering


class AnySequence(RuleBasedStateMachine):
    """A twin does the same without ever iterating in vain, saving or loading: it must not be able to tell."""

    @initialize(
        length=st.integers(1, 40),
        lanes=st.integers(1, 5),
        units_per_batch=st.integers(1, 3),
        unit_size=st.integers(1, 4),
        order=st.sampled_from(list(ORDERS)),
        rule=st.sampled_from(list(RULES)),
        block=st.sampled_from([None, 1, 3]),
        named=st.booleans(),
        seed=st.integers(0, 3),
    )
    def make(
        self,
        length: int,
        lanes: int,
        units_per_batch: int,
        unit_size: int,
        order: str,
        rule: str,
        block: int | None,
        named: bool,
        seed: int,
    ) -> None:
        self.length, self.named = length, named
        self.arguments: dict[str, Any] = {
            "batch_size": lanes * units_per_batch * unit_size,
            "unit_size": unit_size,
            "order": order,
            "rule": rule,
            "block": block,
            "lanes": lanes,
            "seed": seed,
        }
        self.ordering = Ordering(length, **self.arguments)
        self.twin = Ordering(length, **self.arguments)
        self.shards = [sorted(order.tolist()) for order in self.ordering.orders]
        self.random = np.random.default_rng(seed)
        self.saved: tuple[dict[str, Any], Ordering] | None = None
        self.visited: list[int] = []

    def left(self) -> list[int]:
        return list(map(int, self.ordering.remaining()))

    @rule(bad=st.sampled_from([0.0, 0.0, 0.0, float("nan")]))
    def observe(self, bad: float) -> None:
        batch = self.left()[: self.ordering.batch_size]
        epoch = self.ordering.epoch
        rows = torch.from_numpy(self.random.standard_normal((-(-len(batch) // self.ordering.unit_size), 3)))
        rows[0, 0] += bad
        for ordering in (self.ordering, self.twin):
            ordering.observe(rows, torch.tensor(batch) if self.named else None)
        self.visited += batch
        if self.ordering.epoch > epoch:
            assert set(self.visited) == set(range(self.length))
            assert len(self.visited) == self.ordering.examples_per_epoch
            self.visited = []

    @rule()
    def iterate_in_vain(self) -> None:
        before = str(self.ordering.state_dict())
        assert len(self.left()) == self.ordering.examples_left
        self.ordering.sampler._stood_at = []
        assert list(self.ordering.sampler) == self.left()
        assert str(self.ordering.state_dict()) == before

    @rule()
    def break_off(self) -> None:
        for ordering in (self.ordering, self.twin):
            ordering.sampler.set_epoch(ordering.epoch + 1)
        self.visited = []

    @rule()
    def save(self) -> None:
        self.saved = self.ordering.state_dict(), copy.deepcopy(self.twin)
        self.saved_visited = list(self.visited)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        assert self.saved is not None
        state, twin = self.saved
        self.ordering = Ordering(self.length, **self.arguments)
        self.ordering.load_state_dict(state)
        self.twin = copy.deepcopy(twin)
        self.visited = list(self.saved_visited)

    @invariant()
    def orders_are_permutations(self) -> None:
        if self.arguments["order"] == "global-rr":  # examples move between lanes, by design
            assert len(set(self.ordering.order.tolist())) == len(self.ordering.order)
            return
        for order, shard in zip(self.ordering.orders, self.shards, strict=True):
            assert_permutation(order, shard)

    @invariant()
    def what_is_left_completes_the_epoch(self) -> None:
        assert len(self.visited) + len(self.left()) == self.ordering.examples_per_epoch
        assert set(self.visited) | set(self.left()) == set(range(self.length))

    @invariant()
    def the_twin_agrees(self) -> None:
        assert self.ordering.epoch == self.twin.epoch
        assert torch.equal(self.ordering.order, self.twin.order)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

"""Rules that turn an inner product into a sign.

All rules have one shape: the sign of row `k` is `+1` if and only if `s_k <= threshold_k`, where `s_k` is the inner
product of the row with the running sum. Thresholds depend on the rows' squared lengths and on random draws, never on
the signs. They are known for a whole block before its first sign is decided, so one sign loop serves every rule:

    greedy   threshold 0                                   (Lu et al., NeurIPS 2022)
    walk     c * (1 - 2u), u uniform in [0, 1)             (Alweiss, Liu and Sawhney, STOC 2021)
    halving  a_k * u, u uniform in [-1, 1)                 (kernel halving; Carrell et al., ICML 2025)

A rule draws exactly one random number per row, in balancing order, so results do not depend on block size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cdgrab.fields import Fields, damaged

FloatArray = npt.NDArray[np.float64]


class Rule(Protocol):
    """Gives a balancer the thresholds of its rows. Rules are stateful; every balancer has its own."""

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        """Forget the epoch before. `epoch` counts from 0; `num_rows` is the number of rows this one will balance."""

    def thresholds(self, num_rows: int, lengths: Callable[[], FloatArray]) -> FloatArray:
        """The thresholds of the next `num_rows` rows. Call `lengths()` for their squared lengths only if needed."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Greedy:
    """`+1` if and only if the row's inner product with the running sum is at most 0: the paper's rule, the default."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        """`rng` is there so that all rules are made alike; the rule draws nothing."""

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        pass

    def thresholds(self, num_rows: int, lengths: Callable[[], FloatArray]) -> FloatArray:  # noqa: ARG002
        return np.zeros(num_rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Walk:
    """Self-balancing walk: `+1` with probability `1/2 - s / (2c)`, clipped to [0, 1].

    Args:
        rng: Source of the draws.
        c: The walk's constant, in units of a squared gradient length. By default the largest squared length
            so far in the epoch, so that the gradients' scale does not matter.
    """

    def __init__(self, rng: np.random.Generator | None = None, c: float | None = None) -> None:
        if c is not None and not c > 0:
            raise ValueError(f"the walk's constant c is {c}; pass a positive number, or None to adapt it")
        self.c = c
        self._rng = rng or np.random.default_rng(0)
        self._largest = 0.0

    def start_epoch(self, epoch: int, num_rows: int) -> None:  # noqa: ARG002
        self._largest = 0.0

    def thresholds(self, num_rows: int, lengths: Callable[[], FloatArray]) -> FloatArray:
        draws = 1.0 - 2.0 * self._rng.random(num_rows)
        if self.c is not None:
            return self.c * draws
        largest = np.maximum(np.maximum.accumulate(lengths()), self._largest)
        self._largest = float(largest[-1])
        return largest * draws

    def state_dict(self) -> dict[str, Any]:
        return {"rng": copy.deepcopy(self._rng.bit_generator.state), "largest": self._largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = Fields(state)
        self._largest = found.number("largest", least=0.0)
        load_generator(self._rng, found.inside("rng"))


class Halving:
    """Kernel halving with the linear kernel, for any number of lanes.

    `v`, twice the squared sub-Gaussian constant of the running sum, starts each epoch at 0. For row `k` (counted
    from 1 within the epoch) of squared length `b2`:

        lam = log((4 / delta) (1 + log epochs) (1 + log rows) k * epoch)
        a   = max(b2, sqrt(b2 * v * lam))          the row is `+1` iff s <= u * a
        v  += b2 * max(0, 2 + (b2 - 2a) v / a^2)

    Published for one lane; with several, `rows` and `k` count the pairs of all lanes that share a running sum.

    Args:
        rng: Source of the draws.
        delta: Failure probability over the whole run.
        epochs: The number of epochs of the run. It enters only through the logarithm of a logarithm.
    """

    def __init__(self, rng: np.random.Generator | None = None, delta: float = 0.5, epochs: int = 100) -> None:
        if not 0 < delta <= 1:
            raise ValueError(f"delta is {delta}; a failure probability lies in (0, 1]")
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1")
        self.delta = delta
        self.epochs = epochs
        self._rng = rng or np.random.default_rng(0)
        self._epoch = 1
        self._num_rows = 1
        self._row = 0
        self._v = 0.0

    def start_epoch(self, epoch: int, num_rows: int) -> None:
        self._epoch = epoch + 1
        self._num_rows = max(1, num_rows)
        self._row = 0
        self._v = 0.0

    def thresholds(self, num_rows: int, lengths: Callable[[], FloatArray]) -> FloatArray:
        spread = (4 / self.delta) * (1 + math.log(self.epochs)) * (1 + math.log(self._num_rows))
        lengths_K = lengths()
        lam_K = np.log(spread * self._epoch * np.arange(self._row + 1, self._row + num_rows + 1))
        roots_K = np.sqrt(lengths_K) * np.sqrt(lam_K)  # a product of squares might underflow
        self._row += num_rows
        a_K, v = np.empty(num_rows), self._v
        for k, (b2, root) in enumerate(zip(lengths_K.tolist(), roots_K.tolist(), strict=True)):
            a = a_K[k] = max(b2, root * math.sqrt(v))
            if a > 0:
                v += b2 * max(0.0, 2 + (b2 / a - 2) * (v / a))
        self._v = v
        return a_K * (2.0 * self._rng.random(num_rows) - 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rng": copy.deepcopy(self._rng.bit_generator.state),
            "epoch": self._epoch,
            "num_rows": self._num_rows,
            "row": self._row,
            "v": self._v,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = Fields(state)
        self._epoch, self._num_rows = found.whole("epoch", least=1), found.whole("num_rows", least=1)
        self._row, self._v = found.whole("row"), found.number("v", least=0.0)
        load_generator(self._rng, found.inside("rng"))


def thresholds_of(rule: Rule, num_rows: int, lengths: Callable[[], FloatArray]) -> FloatArray:
    """The thresholds that `rule` gives; raises `ValueError` if they are not one number per row."""
    found = np.asarray(rule.thresholds(num_rows, lengths))
    if found.shape != (num_rows,) or found.dtype.kind not in "fiu" or np.isnan(found).any():
        raise ValueError(
            f"the rule {type(rule).__name__} gave thresholds of shape {found.shape} and type {found.dtype} for "
            f"{num_rows} rows; its thresholds() must return one number for each of them, and no NaN"
        )
    return found.astype(np.float64, copy=False)


def load_rule(rule: Rule, state: Fields) -> None:
    """Load the state of a rule; whatever it raises becomes a `ValueError` that names the field."""
    try:
        rule.load_state_dict(dict(state.values))
    except Exception as error:
        raise damaged(f"{state.name(type(rule).__name__)} cannot be read ({error!r})") from error


def load_generator(rng: np.random.Generator, state: Fields) -> None:
    """Load the state of a random generator."""
    inner = state.inside("state")
    for key in inner.values:
        inner.whole(key, most=2**128 - 1)
    for key in ("has_uint32", "uinteger"):
        state.whole(key, most=2**32 - 1)
    rng.bit_generator.state = state.values


RuleMaker = Callable[[np.random.Generator], Rule]
"""A function that makes a rule from a random generator; `Ordering(rule=...)` takes one."""

RULES: dict[str, RuleMaker] = {"greedy": Greedy, "walk": Walk, "halving": Halving}
"""The rules by name."""


def find_rule(rule: str | RuleMaker) -> RuleMaker:
    """The function that makes a rule, by the rule's name. A function is passed through.

    Example:
        >>> find_rule(lambda rng: Walk(rng, c=30.0))(np.random.default_rng(0)).c
        30.0
    """
    if callable(rule):
        return rule
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; choose one of {', '.join(RULES)}")
    return RULES[rule]

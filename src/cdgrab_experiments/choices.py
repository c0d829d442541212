"""From what was typed to configurations: defaults of the task, checks, and the nearest name for a misspelt one."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from cdgrab import ORDERS, RULES
from cdgrab.sources import SketchSource
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.split import check_partition
from cdgrab_experiments.tasks import find_task

OPTIMIZERS = ("sgd", "adam", "adamw")
_OPTIONS = {"batch_size": "batch"}  # options that are not called what they set


@dataclass(frozen=True)
class Choices:
    """Options of a run; None is the task's default."""

    variant: str | None = None
    order: str = "cd-grab"
    source: str = "exact"
    workers: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    seed: int = 0
    optimizer: str | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    partition: str = "iid"


def resolve(task_name: str, choices: Choices) -> RunConfig:
    """The run of a task; raises `ValueError` for what cannot be."""
    task = find_task(task_name)
    order, rule = parse_order(choices.order)
    variant = task.variants[0] if choices.variant is None else choices.variant
    if variant not in task.variants:
        known = ", ".join(name for name in task.variants if name)
        raise ValueError(
            f"{task.name} has no variant {variant!r}; " + (f"choose one of {known}" if known else "it has none")
        )
    chosen = asdict(choices)
    found = {key: default if chosen.get(key) is None else chosen[key] for key, default in asdict(task.settings).items()}
    _check_numbers(found, choices.seed)
    if found["optimizer"] not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {found['optimizer']!r}; choose one of {', '.join(OPTIMIZERS)}")
    check_partition(choices.partition)
    _check_source(choices.source)
    if found["optimizer"] != "sgd":
        found["momentum"] = 0.0  # Adam has its own
    return RunConfig(
        task=task.name,
        variant=variant,
        order=order,
        rule=rule if order not in FREE else "greedy",  # an order without signs has no rule
        source=choices.source if order not in FREE else "exact",
        seed=choices.seed,
        partition=choices.partition,
        **found,
    )


def parse_order(text: str) -> tuple[str, str]:
    """Order and rule: `"pair"`, `"pair+walk"`, or a rule alone, which is `cd-grab` with that rule."""
    order, _, rule = text.partition("+")
    if not rule and order in RULES:
        return "cd-grab", order
    if order in RULES:
        raise ValueError(f"{text!r} names two rules and no order; say cd-grab+{rule}, or {order} alone")
    if order not in ORDERS:
        raise ValueError(
            f"unknown order {order!r}{nearest(order, [*ORDERS, *RULES])}; choose one of {', '.join(ORDERS)}, "
            f"or a rule ({', '.join(RULES)}), with ORDER+RULE for both"
        )
    rule = rule or "greedy"
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}{nearest(rule, RULES)}; choose one of {', '.join(RULES)}")
    return order, rule


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean ...?)"`, if something is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def command(config: RunConfig) -> str:
    """What to type to repeat a run: the options that are not the task's defaults."""
    usual = resolve(config.task, Choices())
    order = config.order if config.rule == "greedy" else f"{config.order}+{config.rule}"
    words = ["cdgrab", "run", config.task, "--order", order, "--seed", str(config.seed)]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ("task", "order", "rule", "seed") and value != getattr(usual, field.name):
            words += [f"--{_OPTIONS.get(field.name, field.name).replace('_', '-')}", str(value)]
    return shlex.join(words)


def _check_numbers(found: dict[str, object], seed: int) -> None:
    for key, least in (("workers", 1), ("batch_size", 1), ("epochs", 1)):
        value = found[key]
        if not isinstance(value, int) or value < least:
            raise ValueError(f"--{_OPTIONS.get(key, key)} is {value}; it must be at least {least}")
    for key in ("lr", "momentum", "weight_decay"):
        value = found[key]
        most = 1.0 if key == "momentum" else float("inf")
        if not isinstance(value, float | int) or not 0 <= value < most or (key == "lr" and value == 0):
            limits = {"lr": "above 0 and finite", "momentum": "at least 0 and below 1"}
            raise ValueError(f"--{key.replace('_', '-')} is {value}; it must be {limits.get(key, 'at least 0')}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"--seed is {seed}; it must be from 0 to {2**31 - 1}")
    if found["batch_size"] % found["workers"]:  # type: ignore[operator]
        raise ValueError(
            f"a batch of {found['batch_size']} cannot be shared evenly by {found['workers']} workers; choose --batch, "
            "the examples of a step of all workers together, as a multiple of --workers"
        )


def _check_source(source: str) -> None:
    kind, _, length = source.partition(":")
    if kind == "sketch" and length.isdecimal():
        SketchSource(length=int(length))
    elif source != "exact":
        raise ValueError(f"unknown source {source!r}; choose exact or sketch:LENGTH, as in sketch:512")


FREE = {name for name, spec in ORDERS.items() if not spec.needs_gradients}

"""The experiments by name, in the order `all` runs them. A new one is a function and one line here."""

from __future__ import annotations

from collections.abc import Callable

from cdgrab_experiments.theory import herding, heterogeneity, non_pl, practice, rates, speedup
from cdgrab_experiments.theory.report import Outcome
from cdgrab_experiments.theory.settings import Settings
from cdgrab_experiments.theory.watch import Watch

Experiment = Callable[[Settings, Watch], Outcome]

EXPERIMENTS: dict[str, Experiment] = {
    "herding": herding.run,
    "rates": rates.run,
    "speedup": speedup.run,
    "heterogeneity": heterogeneity.run,
    "non-pl": non_pl.run,
    "step-size": practice.step_size,
    "momentum": practice.momentum,
    "adam": practice.adam,
    "when-it-helps": practice.when_it_helps,
}

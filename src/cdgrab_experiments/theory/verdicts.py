"""Verdicts: what was claimed, what was found, and how far that is from the edge.

There are two kinds, and they must not be confused. A *guard* is something this code must do, theory or no theory; if
it fails, something is broken. A *measurement* compares what a problem did with what a theorem promises of the worst
one; it may lie outside, which is a finding and not a fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cdgrab_experiments.theory.fits import Slope


@dataclass(frozen=True)
class Verdict:
    """One claim and how it fared.

    Attributes:
        claim: What should be so.
        found: The figure found.
        wanted: The interval it should lie in.
        margin: Distance to the nearer edge, or a factor; negative, or below 1, where the claim does not hold.
        word: `holds` or `FAILS` for a guard; `inside`, `steeper` or `outside` for a measurement.
        guards: Whether this is a guard.
    """

    claim: str
    found: str
    wanted: str
    margin: str
    word: str
    guards: bool

    @property
    def failed(self) -> bool:
        """A guard that does not hold."""
        return self.word == "FAILS"

    @property
    def outside(self) -> bool:
        """A measurement slower than theory promises."""
        return self.word == "outside"


def within(claim: str, value: float, low: float, high: float, *, guards: bool = True) -> Verdict:
    """A figure that should lie between two others.

    Example:
        >>> within("level", 2.5, 2.2, 2.8).margin
        '+0.3'
        >>> within("level", 40.0, 2.2, 2.8).word
        'FAILS'
    """
    margin = min(value - low, high - value) if math.isfinite(value) else -math.inf
    word = ("holds" if margin >= 0 else "FAILS") if guards else ("inside" if margin >= 0 else "outside")
    return Verdict(claim, f"{value:.4g}", f"{low:.4g} to {high:.4g}", f"{margin:+.3g}", word, guards)


def at_most(claim: str, value: float, limit: float, *, guards: bool = True) -> Verdict:
    """A positive figure that should stay below a limit; its margin is a factor.

    Example:
        >>> at_most("bound", 2.0, 3.0).margin
        'factor 1.5'
    """
    factor = limit / value if value > 0 else math.inf
    held = value <= limit  # false for a NaN
    word = ("holds" if held else "FAILS") if guards else ("inside" if held else "outside")
    return Verdict(claim, f"{value:.4g}", f"at most {limit:.4g}", f"factor {factor:.3g}", word, guards)


def at_least(claim: str, value: float, limit: float, *, guards: bool = True) -> Verdict:
    """A positive figure that should reach a limit; its margin is a factor."""
    held = value >= limit
    word = ("holds" if held else "FAILS") if guards else ("inside" if held else "outside")
    return Verdict(claim, f"{value:.4g}", f"at least {limit:.4g}", f"factor {value / limit:.3g}", word, guards)


def slope_within(claim: str, slope: Slope, low: float, high: float) -> Verdict:
    """A measured slope beside the interval that theory gives.

    `inside` if its confidence interval meets theory's; `steeper` if it lies below: the error falls faster than was
    promised, which an upper bound allows; `outside` if it lies above.
    """
    word = "inside"
    if slope.high < low:
        word = "steeper"
    if not slope.low <= high:
        word = "outside"
    wanted = f"{low:.2f} to {high:.2f}" if low < high else f"{low:.2f}"
    return Verdict(claim, str(slope), wanted, f"{high - slope.value:+.2f}", word, guards=False)

"""`verify all --quick` holds; and with one sign flipped in the balancer it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cdgrab.accel import numba_balancing as compiled
from cdgrab.balancing import blocked, tables
from cdgrab_experiments.theory import herding, rates, speedup
from cdgrab_experiments.theory.cli import verify
from cdgrab_experiments.theory.experiments import EXPERIMENTS
from cdgrab_experiments.theory.settings import FULL, QUICK, Settings
from cdgrab_experiments.theory.watch import Watch


@pytest.mark.slow
def test_verify_all_quick(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(verify)
    result = CliRunner().invoke(app, ["all", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name in EXPERIMENTS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "| verdict |" in (tmp_path / f"{name}.md").read_text()
    assert "FAILS" not in (tmp_path / "summary.md").read_text()


# Smaller still: it only has to tell a right sign from a wrong one, and without numba.
SMALL = Settings(
    herding=replace(QUICK.herding, vectors=20_000, rounds=8, series=(("cd-grab", "greedy"),), hard_units=50),
    rates=replace(QUICK.rates, seeds=2, horizons=(8, 16, 32)),
    speedup=replace(QUICK.speedup, workers=(1, 8), seeds=2, epochs=24),
)
GUARDED = {
    "herding": (herding.run, "halves per round"),
    "rates": (rates.run, "`cd-grab` / `rr`"),
    "speedup": (speedup.run, "`cd-grab` / `rr`"),
}


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("flipped", [False, True], ids=["as it is", "one sign flipped"])
def test_a_flipped_sign_fails(name: str, flipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The balancer adds what it should subtract: with `-s` in the place of `s`, every decision is the wrong one."""
    monkeypatch.setattr(compiled, "available", lambda: False)
    if flipped:

        def wrong(gram_KK: np.ndarray, dots_K: np.ndarray, thresholds_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return blocked.block_signs(-gram_KK, -dots_K, thresholds_K)

        monkeypatch.setattr(tables, "block_signs", wrong)
    run, claim = GUARDED[name]
    guards = [verdict for verdict in run(SMALL, Watch()).verdicts if verdict.guards and claim in verdict.claim]
    assert guards
    assert [verdict.failed for verdict in guards] == [flipped] * len(guards), guards


def test_quick_is_the_same_with_less() -> None:
    assert QUICK.quick
    assert not FULL.quick
    assert FULL.herding.vectors == 10**6
    assert FULL.herding.workers == (5, 10, 20, 50, 100)
    assert FULL.speedup.workers == (1, 2, 4, 8, 16, 32, 64)

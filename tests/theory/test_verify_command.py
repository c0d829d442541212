"""The command: what it writes, what it says, what it exits with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cdgrab_experiments.theory import cli, verdicts
from cdgrab_experiments.theory.experiments import Experiment
from cdgrab_experiments.theory.report import Outcome, Table
from cdgrab_experiments.theory.settings import Settings
from cdgrab_experiments.theory.verdicts import Verdict
from cdgrab_experiments.theory.watch import Watch

HOLDS = verdicts.within("level", 2.5, 2.2, 2.8)
FAILS = verdicts.within("level", 40.0, 2.2, 2.8)
OUTSIDE = verdicts.within("slope", 40.0, 2.2, 2.8, guards=False)


def experiment(*found: Verdict) -> Experiment:
    def draw(path: Path) -> None:
        path.write_bytes(b"a figure")

    def run(settings: Settings, watch: Watch) -> Outcome:
        assert not settings.quick
        watch.begin("stand-in", 1)
        watch.step("the only one")
        table = Table("What was found", ["order", "level"], [["cd-grab", "2.5"]])
        return Outcome("a stand-in", "0", [table], list(found), draw)

    return run


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Experiment]:
    """Experiments that take no time."""
    found: dict[str, Experiment] = {"herding": experiment(HOLDS), "rates": experiment(HOLDS, OUTSIDE)}
    monkeypatch.setattr(cli, "EXPERIMENTS", found)
    return found


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(cli.verify)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.usefixtures("experiments")
def test_all_writes_a_figure_and_a_page_for_each_and_a_summary(tmp_path: Path) -> None:
    result = call("all", "--out", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {"herding.png", "herding.md", "rates.png", "rates.md", "summary.md"}
    assert "1 of 1 guards" not in result.output
    assert "2 of 2 guards hold; 1 of 1 measurements lie outside" in result.output
    page = (tmp_path / "new" / "folder" / "herding.md").read_text()
    for expected in (
        "cdgrab verify herding",
        "| level | guard | 2.5 | 2.2 to 2.8 | +0.3 | holds |",
        "torch",
        "Seeds: 0",
    ):
        assert expected in page
    assert "rates: slope: found 40" in (tmp_path / "new" / "folder" / "summary.md").read_text()


def test_a_failed_guard_exits_with_1_and_is_named(experiments: dict[str, Experiment], tmp_path: Path) -> None:
    experiments["rates"] = experiment(HOLDS, FAILS)
    result = call("rates", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "FAILS  rates: level: found 40, expected 2.2 to 2.8" in result.output
    assert (tmp_path / "rates.md").exists()


@pytest.mark.usefixtures("experiments")
def test_strict_counts_measurements_too(tmp_path: Path) -> None:
    assert call("rates", "--out", str(tmp_path)).exit_code == 0
    assert call("rates", "--strict", "--out", str(tmp_path)).exit_code == 3
    assert call("herding", "--strict", "--out", str(tmp_path)).exit_code == 0


@pytest.mark.parametrize(("name", "meant"), [("herdin", "did you mean 'herding'"), ("Rates", "'rates'"), ("xyz", "")])
def test_an_unknown_name_gets_a_suggestion(name: str, meant: str) -> None:
    result = call(name)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"unknown experiment '{name}'")
    assert meant in result.stderr
    assert ("did you mean" in result.stderr) == bool(meant)
    assert "heterogeneity" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("experiments")
def test_a_folder_that_cannot_be_made_or_written_is_named_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("herding", "--out", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "cannot make the folder" in result.stderr
    assert "--out" in result.stderr
    (tmp_path / "closed").mkdir(mode=0o500)
    if not os.access(tmp_path / "closed", os.W_OK):  # root may write anywhere
        result = call("herding", "--out", str(tmp_path / "closed"))
        assert result.exit_code == 2
        assert "not writable" in result.stderr


@pytest.mark.usefixtures("experiments")
def test_a_file_that_cannot_be_written_is_an_error_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "rates.md").mkdir()  # what is to be written there cannot be
    result = call("all", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "cannot write to" in result.stderr
    assert "herding.md" in result.stderr


def test_ctrl_c_says_what_was_written(experiments: dict[str, Experiment], tmp_path: Path) -> None:
    def interrupted(*_: object) -> Outcome:
        raise KeyboardInterrupt

    experiments["rates"] = interrupted
    result = call("all", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "Stopped. Written: " in result.stderr
    assert "herding.png" in result.stderr
    assert "rates" not in result.stderr
    experiments["herding"] = interrupted
    assert "Nothing was written" in call("herding", "--out", str(tmp_path)).stderr

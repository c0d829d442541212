"""The command line: what it prints, what it leaves behind, what it refuses, and with which status."""

from __future__ import annotations

import copy
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from _data import make
from cdgrab_experiments import cli, recipes
from cdgrab_experiments.batch import run_all
from cdgrab_experiments.choices import Choices, parse_order, resolve
from cdgrab_experiments.recipes import RECIPES
from cdgrab_experiments.records import load_all
from cdgrab_experiments.runner import Place
from cdgrab_experiments.tasks import TASKS


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors, each on one line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), " ".join(out.split()), " ".join(err.split())


QUICK = ["--epochs", "2", "--workers", "4", "--batch", "64"]


def test_compare_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orders = ["--orders", "rr,cd-grab,pair,halving", "--seeds", "2"]
    command = ["compare", "digits", *QUICK, *orders, "--results", str(tmp_path)]
    status, out, _ = call(capsys, *command)
    assert status == 0
    assert {(run.config.contender, run.config.seed) for run in load_all(tmp_path)} == {
        (name, seed) for name in ("rr", "cd-grab", "pair", "cd-grab (halving)") for seed in (0, 1)
    }
    assert "cd-grab (halving)" in out
    status, out, _ = call(capsys, *command)
    assert status == 0
    assert out.count("was there already") == 8
    status, out, _ = call(capsys, "report", str(tmp_path), "--out", str(tmp_path / "page"))
    assert status == 0
    assert (tmp_path / "page" / "report.html").exists()


@pytest.mark.slow
def test_several_runs_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "digits", *QUICK, "--orders", "rr,cd-grab", "--seeds", "1"]
    assert call(capsys, *command, "--results", str(tmp_path / "one"))[0] == 0
    assert call(capsys, *command, "--results", str(tmp_path / "two"), "--jobs", "2")[0] == 0
    one, two = (load_all(tmp_path / name) for name in ("one", "two"))
    assert [[r.loss for r in run.epochs] for run in one] == [[r.loss for r in run.epochs] for run in two]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "compare", "digits", *QUICK, "--results", str(tmp_path / "none"), "--dry-run")
    assert status == 0
    assert "6 runs, about" in out
    assert not (tmp_path / "none").exists()


def test_a_run_that_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "run", "digits", *QUICK, "--lr", "1e30", "--results", str(tmp_path))
    assert status == 1
    assert "not finite after" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digit"], "did you mean 'digits'?"),
        (["run", "digits", "--order", "cdgrab"], "did you mean 'cd-grab'?"),
        (["run", "digits", "--order", "pair+walck"], "did you mean 'walk'?"),
        (["run", "digits", "--workers", "0"], "--workers is 0; it must be at least 1"),
        (["run", "digits", "--workers", "3", "--batch", "4"], "cannot be shared evenly by 3 workers"),
        (["run", "digits", "--workers", "5000", "--batch", "5000"], "5000 workers, but only 1536 examples"),
        (["run", "digits", "--order", "halving+walk"], "names two rules and no order; say cd-grab+walk"),
        (["run", "digits", "--lr", "-1"], "--lr is -1.0; it must be above 0"),
        (["run", "digits", "--lr", "inf"], "--lr is inf; it must be above 0 and finite"),
        (["run", "digits", "--momentum", "1"], "--momentum is 1.0; it must be at least 0 and below 1"),
        (["run", "digits", "--seed", "-1"], "--seed is -1"),
        (["run", "digits", "--schedule", "step:0:1"], "schedule 'step:0:1' cannot be read"),
        (["run", "digits", "--device", "cpu:x"], "unknown device 'cpu:x'"),
        (["run", "digits", "--device", "cuda:7"], "--device cuda:7, but PyTorch sees"),
        (
            ["compare", "digits", "--orders", "global-rr", "--partition", "sorted", "--dry-run"],
            "deals anew every epoch",
        ),
        (["run", "digits", "--source", "sketch"], "unknown source 'sketch'"),
        (["run", "digits", "--partition", "half"], "unknown partition 'half'"),
        (["run", "digits", "--variant", "tree"], "digits has no variant 'tree'; choose one of softmax, mlp"),
        (["run", "digits", "--optimizer", "lbfgs"], "unknown optimizer 'lbfgs'"),
        (["run", "digits", "--device", "tpu"], "unknown device 'tpu'"),
        (["run", "digits", "--log", "paper"], "unknown --log 'paper'"),
        (["run", "digits", "--results", "/proc/none"], "cannot write to /proc/none"),
        (["run", "hmda", "--data", "/nowhere"], "is not in the data folder /nowhere"),
        (["compare", "digits", "--orders", ","], "--orders is empty"),
        (["paper", "hmdaa"], "unknown figure 'hmdaa' (did you mean 'hmda'?)"),
        (["report", "/nowhere"], "/nowhere"),
        (["data", "--download", "m4"], "did you mean 'm4-weekly'?; choose one of hmda-ny-2017"),
        (["zzz"], "No such command 'zzz'; see cdgrab --help"),
        (["run"], "Missing argument 'task'; see cdgrab run --help"),
        (["run", "digits", "--epochs", "many"], "see cdgrab run --help"),
        (["paper"], "no figure is named; choose one of the above, as in cdgrab paper hmda"),
        (["verify", "herdin"], "herding"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, errors = call(capsys, *arguments)
    assert status == 2
    assert message in errors
    assert "Traceback" not in errors


def test_without_arguments_it_says_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys)
    assert status == 0
    for command in ("cdgrab compare digits", "cdgrab report results", "cdgrab paper --list", "cdgrab --help"):
        assert command in out


def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "data", "--data", str(tmp_path))
    assert status == 0
    for name in ("a9a", "m4-weekly", "wikitext-2", "cifar-10", "mnist", "glue-rte"):
        assert re.search(rf"{name} (missing|present)", out)


def test_every_figure_of_the_paper_is_a_list_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "paper", "--list")
    assert status == 0
    for name, recipe in RECIPES.items():
        assert name in out
        configs = recipe.configs()
        assert len(set(configs)) == len(configs)
        assert {config.task for config in configs} <= TASKS.keys()
        assert any(config.order == "rr" for config in configs)
        assert {config.epochs for config in recipe.configs(seeds=1, epochs=3)} == {3}
    assert recipes.HERDING in out


def test_settings_are_the_papers() -> None:
    hmda, gpt2 = resolve("hmda", Choices()), resolve("gpt2", Choices())
    assert (hmda.workers, hmda.batch_size, hmda.lr, hmda.momentum, hmda.epochs) == (4, 16, 5e-3, 0.9, 50)
    assert (gpt2.workers, gpt2.batch_size, gpt2.optimizer, gpt2.lr, gpt2.epochs) == (64, 64, "adamw", 5e-4, 30)
    cifar = RECIPES["cifar10-workers"].configs()
    assert {(c.workers, c.order) for c in cifar} == {
        (w, o) for w in (4, 8, 16, 32, 64) for o in ("rr", "cd-grab", "id-grab", "pair")
    }
    assert {(c.batch_size, c.lr, c.momentum, c.weight_decay, c.epochs) for c in cifar} == {(64, 1e-3, 0.9, 1e-2, 100)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rr", ("rr", "greedy")),
        ("halving", ("cd-grab", "halving")),
        ("pair+walk", ("pair", "walk")),
        ("cd-grab", ("cd-grab", "greedy")),
    ],
)
def test_orders_and_rules(text: str, found: tuple[str, str]) -> None:
    assert parse_order(text) == found


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_other_writers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither package is needed for the tests: what matters is what they are told."""
    told: list[Any] = []

    class Writer:
        def __init__(self, *where: Any) -> None:
            told.append(where)

        def add_scalar(self, *what: Any) -> None:
            told.append(what)

        def log(self, figures: dict[str, float], step: int) -> None:
            told.extend((name, value, step) for name, value in figures.items())

        def flush(self) -> None: ...

        def finish(self) -> None:
            told.append("finished")

    def init(**options: Any) -> Writer:
        assert options["mode"] == "offline"
        return Writer(options["dir"])

    name = "torch.utils.tensorboard" if kind == "tensorboard" else "wandb"
    fake = types.ModuleType(name)
    fake.SummaryWriter, fake.init = Writer, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, fake)
    assert call(capsys, "run", "digits", *QUICK, "--results", str(tmp_path), "--log", kind)[0] == 0
    (run,) = load_all(tmp_path)
    assert ("loss", run.epochs[-1].loss, 2) in told
    assert ("metrics/accuracy", run.epochs[-1].metrics["accuracy"], 2) in told
    assert ("finished" in told) == (kind == "wandb")
    before = len(told)
    assert call(capsys, "run", "digits", *QUICK, "--results", str(tmp_path), "--log", kind)[0] == 0
    assert len(told) == before  # what was there already has been told


def test_what_makes_no_difference_makes_no_other_run() -> None:
    assert resolve("digits", Choices(order="rr+walk")) == resolve("digits", Choices(order="rr"))
    adam = Choices(optimizer="adam", momentum=0.5)
    assert resolve("digits", adam) == resolve("digits", replace(adam, momentum=0.1))


def test_brackets_in_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "run", "digits", *QUICK, "--results", str(tmp_path / "a[/]b"))
    assert status == 0
    assert "a[/]b" in out


def test_jobs_are_for_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, errors = call(capsys, "compare", "digits", "--jobs", "2", "--results", str(tmp_path))
    assert status == 2
    assert "--jobs is for one process" in errors


def test_a_missing_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, _, errors = call(capsys, "run", "digits", *QUICK, "--results", str(tmp_path), "--log", "wandb")
    assert status == 2
    assert "pip install wandb" in errors


def test_records_are_plain_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "run", "digits", *QUICK, "--results", str(tmp_path))[0] == 0
    info = json.loads(next(tmp_path.rglob("run.json")).read_text())
    assert info["command"] == "cdgrab run digits --order cd-grab --seed 0 --batch 64 --epochs 2"
    assert info["environment"]["torch"]
    lines = next(tmp_path.rglob("epochs.jsonl")).read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("name", RECIPES)
def test_every_figure_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tiny data, with few workers and one epoch: all orders, sources and splits of the figure."""
    configs = RECIPES[name].configs(seeds=1, epochs=1)
    problem = make(configs[0].task, tmp_path, configs[0].variant)
    todo = list(dict.fromkeys(replace(c, workers=problem.shards or 2, batch_size=4) for c in configs))
    monkeypatch.setitem(TASKS, todo[0].task, replace(TASKS[todo[0].task], load=lambda *_: copy.deepcopy(problem)))
    runs = run_all(todo, Place(tmp_path / "results", tmp_path), Console(quiet=True))
    assert [run.config for run in runs] == todo
    assert all(run.complete and run.info.stopped is None for run in runs)

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from _inputs import randn
from cdgrab.paper import demo
from cdgrab.paper.compare import compare
from cdgrab.paper.tasks.digits import SMALL_MLP, SOFTMAX_REGRESSION, Network, load, minimum
from cdgrab.paper.train import EpochRecord, RunConfig, train


@pytest.mark.parametrize("widths", [(5, 3), (5, 4, 3), (6, 5, 4, 3)])
def test_rows_equal_automatic_differentiation(widths: tuple[int, ...]) -> None:
    network = Network(widths, l2=0.1)
    theta = randn(network.dim, dtype=torch.float64)
    x, y = randn(7, widths[0], dtype=torch.float64), torch.arange(7) % 3
    rows = network.rows(theta, x, y)
    for i in range(7):
        grad = torch.func.grad(network.loss)(theta, x[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(rows[i], grad)


def test_minimum_is_where_the_gradient_vanishes() -> None:
    x, y = load()
    lowest = minimum(SOFTMAX_REGRESSION, x, y)
    (last,) = [r for r in train(config("cd-grab", epochs=30), x, y) if r.epoch == 30]
    assert lowest < last.loss < lowest + 0.005


def config(order: str, epochs: int = 8, seed: int = 0) -> RunConfig:
    return RunConfig("softmax", SOFTMAX_REGRESSION, order, workers=16, step_size=0.8, epochs=epochs, seed=seed)


def test_cd_grab_beats_rr_in_the_regime_of_the_demo() -> None:
    x, y = load()
    lowest = minimum(SOFTMAX_REGRESSION, x, y)
    after = {order: [list(train(config(order, 12, s), x, y))[-1] for s in range(2)] for order in ("rr", "cd-grab")}
    for rr, balanced in zip(after["rr"], after["cd-grab"], strict=True):
        assert (balanced.loss - lowest) < (rr.loss - lowest) / 2
        assert balanced.herding_bound < rr.herding_bound / 1.5


def test_the_first_epoch_is_the_same_for_both_orders() -> None:
    x, y = load()
    one, other = (list(train(config(order, epochs=1), x, y)) for order in ("rr", "cd-grab"))
    assert one[1].loss == other[1].loss


def test_compare_counts_from_the_last_epoch_above_the_target() -> None:
    def run(losses: list[float]) -> list[EpochRecord]:
        return [EpochRecord(epoch, loss, 2.0 * epoch, 0.0, 1.0) for epoch, loss in enumerate(losses)]

    runs = {config("rr"): run([9, 3, 5, 4]), config("cd-grab"): run([9, 3, 4.5, 2]), config("never"): run([9, 9, 9, 9])}
    rr, ours, never = compare(runs, rival="rr", floors={"softmax": 1.0})
    assert (rr.final.mean, rr.epochs and rr.epochs.mean) == (3.0, 3.0)
    assert (ours.final.mean, ours.epochs and ours.epochs.mean, ours.seconds and ours.seconds.mean) == (1.0, 3.0, 6.0)
    assert never.epochs is None


def test_the_demo_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--results", str(tmp_path / "new"), "--seeds", "1", "--epochs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "cd-grab against random reshuffling" in printed
    assert "comparison.png" in printed.replace("\n", "")
    lines = [json.loads(line) for line in (tmp_path / "new" / "records.jsonl").read_text().splitlines()]
    assert lines[0]["environment"]["torch"] == torch.__version__
    assert len(lines) == 1 + 2 * len(demo.configs(1, 1))
    assert (tmp_path / "new" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert SMALL_MLP.dim == 64 * 32 + 32 + 32 * 10 + 10


def test_bad_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--seeds", "0"])
    assert "--seeds is 0" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--results", str(tmp_path / "file" / "below")])
    assert "cannot make the folder" in capsys.readouterr().err

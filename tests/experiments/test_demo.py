"""The demo in small: its regime, its records and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdgrab_experiments import demo
from cdgrab_experiments.compare import compare
from cdgrab_experiments.records import load_all


@pytest.mark.slow
def test_cd_grab_beats_rr_in_the_regime_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--results", str(tmp_path), "--seeds", "2", "--epochs", "10"]) == 0
    runs = load_all(tmp_path)
    assert len(runs) == 4 * 2 * 2
    for comparison in compare(runs):
        rr, cd_grab = comparison.row("rr"), comparison.row("cd-grab")
        assert rr is not None
        assert cd_grab is not None
        ours, theirs = (comparison.runs[order] for order in ("cd-grab", "rr"))
        assert all(ours[seed].epochs[-1].loss < theirs[seed].epochs[-1].loss for seed in range(2))
        if comparison.setting.variant == "softmax":
            assert rr.above is not None
            assert cd_grab.above is not None
            assert cd_grab.above.mean < rr.above.mean / 2
    assert "cd-grab" in (tmp_path / "report.html").read_text()
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1] == f"A page to look at: {tmp_path / 'report.html'}"
    assert len(lines) < 24  # a screen
    assert all(len(line) <= 80 for line in lines[:-1])
    assert [line.split(",")[0] for line in lines if "workers" in line] == ["softmax", "softmax", "mlp", "mlp"]
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--epochs", "-1"], ["--results", "/proc/none"]])
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        demo.main(arguments)
    assert refused.value.code == 2
    assert arguments[1] in capsys.readouterr().err

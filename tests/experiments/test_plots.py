from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from PIL import Image

from _runs import made_experiment, made_run
from cdgrab_experiments.compare import compare
from cdgrab_experiments.curves import curves
from cdgrab_experiments.looks import looks
from cdgrab_experiments.plots import by_workers, slug, training, write_figures, zoom_limits


def test_every_figure_is_there_and_small(tmp_path: Path) -> None:
    runs = made_experiment(seeds=2, epochs=8) + made_experiment(seeds=2, epochs=8, workers=16, minimum=None)
    written = write_figures(compare(runs), tmp_path / "new")
    names = {"hmda-4-workers-training", "hmda-4-workers-ordering", "hmda-16-workers-training"}
    names |= {"hmda-16-workers-ordering", "hmda-by-workers"}
    assert {path.name for path in written} == {f"{name}.{kind}" for name in names for kind in ("png", "pdf")}
    assert sorted(written) == sorted((tmp_path / "new").iterdir())
    for path in written:
        assert path.stat().st_size < 120_000
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert 400 < picture.width < 1300
        else:
            assert path.read_bytes().startswith(b"%PDF")


def test_figures_of_runs_with_nothing_in_them(tmp_path: Path) -> None:
    empty = replace(made_run([2, 1]), epochs=[])
    assert write_figures(compare([empty]), tmp_path) == []
    bare = made_run([math.nan, math.nan], pace=0.0)
    bare = replace(bare, epochs=[replace(r, metrics={}, herding_bound=None, imbalance=None) for r in bare.epochs])
    assert len(write_figures(compare([bare]), tmp_path)) == 2
    short = made_run([2.0])
    assert write_figures(compare([short]), tmp_path)


def test_several_settings_go_into_one_figure(tmp_path: Path) -> None:
    comparisons = compare(made_experiment(seeds=1, epochs=3) + made_experiment(seeds=1, epochs=3, workers=8))
    png, pdf = training(comparisons, tmp_path / "both")
    with Image.open(png) as picture:
        assert picture.height > 500
    assert pdf.name == "both.pdf"


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    comparisons = compare(made_experiment(seeds=1, epochs=3))
    first = [path.read_bytes() for path in write_figures(comparisons, tmp_path)]
    assert first == [path.read_bytes() for path in write_figures(comparisons, tmp_path)]


def test_numbers_of_workers_are_compared_only_where_nothing_else_differs() -> None:
    runs = made_experiment(seeds=1, epochs=2) + made_experiment(seeds=1, epochs=2, workers=8)
    (group,) = by_workers(compare(runs))
    assert [comparison.setting.workers for comparison in group] == [4, 8]
    assert by_workers(compare(runs + made_experiment(seeds=1, epochs=2, workers=8, lr=0.1))) == []
    assert by_workers(compare(made_experiment(seeds=1, epochs=2))) == []


def test_names_of_files_hold_whatever_titles_hold() -> None:
    assert slug("m4 (weekly), 4 workers, lr 0.001") == "m4-weekly-4-workers-lr-0.001"
    assert slug("../</script>") == "script"
    assert slug("///") == "setting"


def test_looks_differ() -> None:
    names = ["rr", "cd-grab", "pair", "id-grab", *(f"cd-grab, sketch of {2**i}" for i in range(12))]
    found = looks(names)
    assert len({(look.light, look.dash) for look in found.values()}) == len(names)


def test_zoom_leaves_out_the_start() -> None:
    (comparison,) = compare([made_run([100, 3, 2, 1, 1, 1, 1, 1, 1, 1, 0])])
    line = curves(comparison.runs)["rr"]
    low, high = zoom_limits([(line.epochs, line.loss)]) or (0, 0)
    assert -0.1 < low < 0 < high < 1.1

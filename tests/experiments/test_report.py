from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from _runs import INFO, made_experiment, made_run
from cdgrab_experiments import published, records
from cdgrab_experiments.compare import compare
from cdgrab_experiments.estimates import Estimate
from cdgrab_experiments.markdown import markdown
from cdgrab_experiments.records import Run
from cdgrab_experiments.report import page, write_report
from cdgrab_experiments.words import interval, number, spread, verdicts


def write(folder: Path, runs: list[Run]) -> None:
    for run in runs:
        records.save(folder / run.config.task / run.config.folder_name, run)


def data_of(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    parsed = json.loads(found[1])
    assert isinstance(parsed, dict)
    return parsed


def test_a_report_is_one_page_a_table_and_figures(tmp_path: Path) -> None:
    write(tmp_path / "results", made_experiment(seeds=2, epochs=6))
    path = write_report(tmp_path / "results", tmp_path / "new" / "report")
    assert path == tmp_path / "new" / "report" / "report.html"
    text = path.read_text()
    assert "cdgrab run hmda --order cd-grab --workers 4 --seed 1" in text
    assert "stand-in data" in text
    assert "Some CPU, 2 cores" in text
    assert "Coordinating Distributed Example Orders" in text
    assert "0.33546" in text  # the paper's
    assert "6 instead of 50" in text  # epochs
    assert len(list((path.parent / "figures").glob("*.png"))) == 2
    assert "| cd-grab (2 seeds) |" in (path.parent / "comparison.md").read_text()
    assert not list(path.parent.rglob("*.partial"))


def test_nothing_on_the_page_points_elsewhere() -> None:
    text = page(compare(made_experiment(seeds=1, epochs=3)))
    assert re.findall(r'(?:src|href|action)="(?!#|data:)[^"]*"', text) == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_the_same_records_give_the_same_page() -> None:
    runs = made_experiment(seeds=2, epochs=3)
    assert page(compare(runs)) == page(compare(list(reversed(runs))))


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a\"'&\u2028b"])
def test_names_from_records_stay_text(name: str) -> None:
    info = replace(INFO, metric=name, data=name, environment={name: name}, stopped=None)
    runs = [made_run([2, 1], info=info, task=name, order=order, rule=name) for order in ("rr", name)]
    runs = [replace(run, info=replace(run.info, command=name, stopped=name)) for run in runs]
    text = page(compare(runs))
    assert "<img src=x" not in text
    assert "alert(1)</script>" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert name in json.dumps(data_of(text), ensure_ascii=False) or '"' in name


def test_two_hundred_runs_stay_a_small_page() -> None:
    runs = [run for workers in range(1, 11) for run in made_experiment(seeds=5, epochs=100, workers=workers)]
    assert len(runs) == 200
    assert len(page(compare(runs))) < 1_500_000


def test_long_runs_are_thinned_out_to_their_last_epoch() -> None:
    text = page(compare([made_run([1 / (1 + epoch) for epoch in range(2001)])]))
    (line,) = data_of(text)["setting-0"]["series"]  # type: ignore[index]
    assert len(line["epochs"]) == 240
    assert (line["epochs"][0], line["epochs"][-1]) == (0, 2000)


def test_runs_in_every_state_make_a_page() -> None:
    whole = made_experiment(seeds=2, epochs=4)
    nothing = replace(made_run([2, 1], order="pair"), epochs=[])
    stopped = replace(made_run([2, float("nan")], order="pair"), info=replace(INFO, stopped="NaN"))
    bare = made_run([2, 1], info=replace(INFO, environment={}, data="", command=""))
    bare = replace(bare, epochs=[replace(r, metrics={}, herding_bound=None, imbalance=None) for r in bare.epochs])
    for runs in ([nothing], [stopped], [bare], [*whole, nothing], whole[2:]):
        assert "</html>" in page(compare(runs))


def test_metrics_that_were_not_finite_are_gaps(tmp_path: Path) -> None:
    run = made_run([2, float("nan"), 1])
    write(tmp_path / "results", [run])
    assert "</html>" in write_report(tmp_path / "results", tmp_path / "out").read_text()


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a folder"):
        write_report(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match=r"no run\.json anywhere"):
        write_report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("break_it", ["truncate", "binary", "remove"])
def test_an_unreadable_run_is_named(tmp_path: Path, break_it: str) -> None:
    write(tmp_path, made_experiment(seeds=1, epochs=2, orders=("rr",)))
    (epochs,) = tmp_path.rglob("epochs.jsonl")
    if break_it == "truncate":
        epochs.write_text(epochs.read_text()[:-20])
    elif break_it == "binary":
        epochs.write_bytes(b"\xff\xfe\x00")
    else:
        epochs.unlink()
    with pytest.raises(ValueError, match=re.escape(epochs.parent.name)):
        write_report(tmp_path, tmp_path / "out")


def said(runs: list[Run]) -> tuple[str, str]:
    (verdict,) = verdicts(compare(runs)[0])
    return verdict.tone, verdict.text


def pairs(ours: list[list[float]], *, pace: float = 1.0) -> list[Run]:
    rivals = [made_run([8, 7, 6, 5, 4], seed=seed) for seed in range(len(ours))]
    return rivals + [made_run(losses, pace=pace, order="cd-grab", seed=seed) for seed, losses in enumerate(ours)]


def test_verdicts_follow_from_the_figures() -> None:
    fast, slow = [8.0, 4, 3, 2, 1], [8.0, 7, 7, 7, 7]
    reached = "It reached rr's final loss after 0.25 of the epochs"
    lower = "cd-grab ends 3.00 below rr's loss (2 seeds)."
    assert said(pairs([fast, fast])) == (
        "gain",
        f"{lower} {reached} and 0.25 of the seconds. An epoch takes 1.00 times as long as with rr.",
    )
    tone, text = said(pairs([fast, fast], pace=5.0))
    assert tone == "gain"
    assert "That is no clear gain in seconds. An epoch takes 5.00 times as long" in text
    assert said(pairs([fast]))[0] == "unclear"
    assert "One seed cannot tell" in said(pairs([fast]))[1]
    tone, text = said(pairs([fast, slow, fast]))
    assert tone == "unclear"
    assert "in 2 of 3 seeds, there after 0.25 of the epochs" in text
    tone, text = said(pairs([slow, slow]))
    assert tone == "none"
    assert text.startswith("cd-grab ends 3.00 above rr's loss (2 seeds). It never got down to rr's final loss to stay.")
    assert said(pairs([[8.0, 7, 6, 5, 3.9]] * 2))[0] == "gain"
    assert said(pairs([[8.0, 7, 6, 5, 4]] * 2)) == (
        "none",
        "cd-grab ends at rr's loss (2 seeds). The interval leaves out the paper's gap (0.0018). It reached rr's final "
        "loss after 1.00 of the epochs and 1.00 of the seconds. An epoch takes 1.00 times as long as with rr.",
    )
    assert said(pairs([fast])[1:])[0] == "unknown"


def test_a_verdict_names_seeds_that_diverged() -> None:
    runs = pairs([[8.0, 4, 3, 2, 1]] * 3)
    runs[-1] = replace(runs[-1], epochs=runs[-1].epochs[:2], info=replace(runs[-1].info, stopped="NaN"))
    tone, text = said(runs)
    assert tone == "unclear"
    assert "It diverged in 1 of 3 seeds." in text
    runs[-3:] = [replace(run, epochs=run.epochs[:2], info=replace(run.info, stopped="NaN")) for run in runs[-3:]]
    assert said(runs) == ("none", "cd-grab diverged in all of 3 seeds, where rr did not.")


def test_the_table_has_difference_seeds_and_verdict() -> None:
    runs = [made_run([8, 7, 4 + 0.01 * seed], seed=seed) for seed in range(3)]
    runs += [made_run([8, 7, loss], seed=seed, order="cd-grab") for seed, loss in enumerate([3.9, 3.98, 3.87])]
    text = markdown(compare(runs))
    # Differences -0.1, -0.03 and -0.15: their deviation is 0.06, and the paper's gap 0.00179.
    assert "| -0.09 ± 0.15 (0.0018 takes 8,903 seeds) | cannot tell |" in text
    glance = page(compare([*runs, *(replace(run, config=replace(run.config, workers=8)) for run in runs)]))
    assert glance.count("<td>Cannot tell") + glance.count("cannot tell") >= 2


def test_several_settings_begin_with_all_of_them_at_a_glance() -> None:
    runs = [made_run([8, 7, 4], seed=seed, workers=workers) for seed in range(2) for workers in (4, 8)]
    runs += [made_run([8, 7, 3], seed=seed, order="cd-grab") for seed in range(2)]
    runs.append(made_run([8, 7, 5], seed=0, order="pair", workers=8))
    text = markdown(compare(runs))
    assert text.index("## At a glance") < text.index("## hmda, 4 workers")
    assert "| hmda, 4 workers (stand-in data) | 2 | -1.00 (0.0018 takes 2 seeds) | gain | 0.875 | 0.15 |" in text
    assert "| hmda, 8 workers (stand-in data) | — | — | — | — | — | — | — |" in text
    assert "At a glance" not in markdown(compare([run for run in runs if run.config.workers == 4]))


def test_a_noisy_rival_is_no_gain_for_others() -> None:
    noisy = [8.0, 4, 3.9, 3.9, 4]
    runs = [made_run(noisy, seed=seed, order=order) for order in ("rr", "cd-grab") for seed in range(2)]
    tone, text = said(runs)
    assert tone == "none"
    assert "rr itself settles there after 0.25" in text


def test_numbers_are_written_as_people_write_them() -> None:
    assert [number(v) for v in (0.33546, 223.6, 5.311, 6e-7, 0.0)] == ["0.33546", "223.60", "5.3110", "6.00e-7", "0"]
    assert spread(Estimate(0.33546, 0.00012, 0.0001, 5)) == "0.33546 ± 0.00012"
    assert spread(Estimate(6e-7, 1e-7, 1e-7, 5)) == "(6.0 ± 1.0)e-7"
    assert spread(Estimate(223.6, 1.42, 1.0, 5)) == "223.6 ± 1.4"
    assert spread(Estimate(0.335, 1e-9, 1e-9, 5)) == "0.335000 ± 1e-9"
    assert interval(Estimate(0.158, 0.01, 0.0123, 5)) == "0.158 ± 0.012"
    assert interval(Estimate(1.0, None, None, 1)) == "1.00"
    assert spread(None) == interval(None) == "—"


def test_tables_in_markdown_keep_their_columns() -> None:
    lines = markdown(compare(made_experiment(seeds=1, epochs=2, orders=("rr", "a|b"), task="digits"))).splitlines()
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")}
    assert len(cells) == 1


def test_points_of_the_papers_curves_stand_beside_ours() -> None:
    """With the metric that is theirs, over seeds, of finished runs; none for epochs that were not run."""
    info = replace(INFO, metric="test_perplexity", data="")
    runs = []
    for seed in range(3):
        run = made_run([9.0 - 0.1 * epoch + seed for epoch in range(9)], info=info, task="wikitext2", seed=seed)
        told = [replace(r, metrics={**r.metrics, "test_perplexity_published": 100.0 + r.epoch}) for r in run.epochs]
        runs.append(replace(run, epochs=told[: 9 if seed < 2 else 7]))
        lower = [9.0 - 0.15 * epoch + seed * (1 + 0.01 * epoch) for epoch in range(9)]
        runs.append(made_run(lower, info=info, task="wikitext2", seed=seed, order="cd-grab"))
    text = markdown(compare(runs))
    assert "| loss after 5 epochs, D-RR (rr) | 5.67 | 9.00 ± 0.71 |" in text
    assert "| loss after 10 epochs, D-RR (rr) | 5.625 | — |" in text
    assert "| test perplexity after 5 epochs, D-RR (rr) | 285.3 | 105.00 |" in text
    assert "| final loss, D-RR (rr) | 5.361 | 8.70 ± 0.71 |" in text
    assert "| test perplexity after 1 epoch, D-RR (rr) | 334 | 101.00 |" in text
    # Of the two seeds that both finished: -0.25 and -0.20 after 5 epochs.
    assert "| loss after 5 epochs, CD-GraB less D-RR | -0.053 | -0.22 ± 0.32 |" in text
    assert "| final loss, CD-GraB less D-RR | -0.05 | -0.36 ± 0.51 |" in text
    assert "lr 0.005 instead of 5.0; epochs 8 instead of 50." in text


def test_the_papers_figures_are_found_by_setting() -> None:
    setting = made_run([2, 1]).config.setting
    hmda = published.find(setting)
    assert hmda is not None
    assert hmda.epochs_ratio == "0.15"
    assert published.differences(setting, hmda) == ["epochs 1 instead of 50"]
    cifar10 = published.find(replace(setting, task="cifar10", workers=64, lr=1e-3))
    assert cifar10 is not None
    assert (cifar10.loss["pair"], cifar10.epochs_ratio) == (0.697, "0.73 to 0.76")
    swept = published.find(replace(setting, task="cifar10", workers=64, lr=1e-2))
    assert swept is not None
    assert swept.loss == {"cd-grab": 0.899, "rr": 1.024}
    lstm = replace(setting, task="wikitext2", variant="published", batch_size=4, lr=5.0, epochs=20)
    whole, after_20 = (published.find(replace(lstm, epochs=epochs)) for epochs in (50, 20))
    assert whole is not None
    assert after_20 is not None
    assert (whole.epochs_ratio, after_20.epochs_ratio) == ("0.30", "0.63")
    assert published.differences(lstm, after_20) == []
    assert published.find(replace(setting, task="digits")) is None

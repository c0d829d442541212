from __future__ import annotations

import math
from dataclasses import replace

import pytest

from _runs import INFO, made_experiment, made_run
from cdgrab_experiments.compare import compare, reached
from cdgrab_experiments.curves import curve, time_split
from cdgrab_experiments.estimates import Estimate, Gap
from cdgrab_experiments.markdown import markdown
from cdgrab_experiments.records import Run
from cdgrab_experiments.words import verdicts


def test_reached_is_where_a_straight_line_crosses_for_the_last_time() -> None:
    epochs = made_run([9.0, 3.0, 5.0, 1.0], pace=2.0).epochs  # below 4 at epoch 1, above again at 2
    assert reached(epochs, 4.0) == (2.25, 4.5)
    assert reached(epochs, 1.0) == (3.0, 6.0)
    assert reached(epochs, 9.0) == (0.0, 0.0)
    assert reached(epochs, 0.5) is None
    assert reached([], 1.0) is None


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_above_any_target(hole: float) -> None:
    assert reached(made_run([9.0, 1.0, hole, 1.0]).epochs, 4.0) == (3.0, 3.0)
    assert reached(made_run([9.0, 1.0, hole]).epochs, 4.0) is None


def two_seeds() -> list[Run]:
    """`rr` ends at 4 in 4 epochs and 8 seconds; `cd-grab` is there after 1 and 2 epochs of 3 seconds."""
    info = replace(INFO, minimum=1.0)
    return [
        made_run([8, 7, 6, 5, 4], pace=2.0, info=info, seed=0),
        made_run([8, 7, 6, 5, 4], pace=2.0, info=info, seed=1),
        made_run([8, 4, 3, 2, 1.5], pace=3.0, info=info, seed=0, order="cd-grab"),
        made_run([8, 6, 4, 3, 2.5], pace=3.0, info=info, seed=1, order="cd-grab"),
    ]


def test_seconds_of_runs_that_shared_the_machine_are_left_out() -> None:
    """Also of one that shared it only before it was interrupted."""
    rr, *others = two_seeds()
    crowd = {**INFO.environment, "runs at a time": 1, "before": [{"runs at a time": 3}]}
    shared = replace(rr, info=replace(rr.info, environment=crowd))
    (comparison,) = compare([shared, *others])
    mine, ours = comparison.rows
    assert ours.epochs_ratio == Estimate.of([1 / 4, 2 / 4])
    assert ours.seconds_ratio == Estimate.of([6 / 8])
    assert ours.pace == Estimate.of([1.5])
    assert mine.seconds_per_epoch == Estimate.of([2.0])
    assert comparison.notes == ["Several runs shared the machine: their seconds are left out."]
    line = curve(comparison.runs["rr"])
    assert line is not None
    assert line.seconds.tolist() == [0, 2, 4, 6, 8]
    assert time_split({0: comparison.runs["rr"][0]}) is None
    text = markdown([comparison])
    assert "after 0.38 of the epochs and 0.75 of the seconds (of 1 seed)." in text
    assert "6.00 s, 1 of 2 seeds" in text
    everyone = [replace(run, info=replace(run.info, environment=crowd)) for run in two_seeds()]
    (comparison,) = compare(everyone)
    assert all(row.seconds_ratio is None and row.seconds_per_epoch is None for row in comparison.rows)
    line = curve(comparison.runs["cd-grab"])
    assert line is not None
    assert all(map(math.isnan, line.seconds))


@pytest.mark.parametrize("shared", [[], [1, 2], [0, 1, 2]])
def test_a_gain_in_seconds_needs_seconds_of_several_seeds(shared: list[int]) -> None:
    crowd = {**INFO.environment, "runs at a time": 3}
    runs = []
    for seed in range(3):
        info = replace(INFO, environment=crowd) if seed in shared else INFO
        runs.append(made_run([8, 7, 6, 5, 4], pace=2.0, info=info, seed=seed))
        runs.append(made_run([8, 4 - 0.1 * seed, 3, 2, 1.5], pace=3.0, info=info, seed=seed, order="cd-grab"))
    (verdict,) = verdicts(compare(runs)[0])
    assert verdict.tone == "gain"
    assert ("Too few runs were timed" in verdict.text) == bool(shared)


@pytest.mark.parametrize(("last", "words"), [(2.5, "0.53 of the epochs"), (5.0, "in 1 of 2 seeds, there")])
def test_what_two_seeds_can_tell(last: float, words: str) -> None:
    """Lower in both seeds, but by very different amounts; or in one of them only."""
    runs = [made_run([8, 7, 6, 5, 4], seed=seed) for seed in (0, 1)]
    runs.append(made_run([8, 3, 3, 2, 1.5], seed=0, order="cd-grab"))
    runs.append(made_run([8, 7, 6, 5, last], seed=1, order="cd-grab"))
    (verdict,) = verdicts(compare(runs)[0])
    assert verdict.tone == "unclear"
    assert "That cannot tell: to see the paper's gap (0.0018) takes" in verdict.text
    assert words in verdict.text


def test_the_gap_one_is_looking_for() -> None:
    """The paper's; less where there is less to gain; and something worth having where the paper has nothing."""
    runs = two_seeds()
    found = compare(runs)[0].gap
    assert found is not None
    assert found.source == "the paper's gap"
    assert found.value == pytest.approx(0.33725 - 0.33546)
    close = [replace(run, info=replace(run.info, minimum=3.9995)) for run in runs]
    found = compare(close)[0].gap
    assert found is not None
    assert found.source == "half of rr's distance to the minimum"
    assert found.value == pytest.approx(0.00025)
    plain = replace(INFO, minimum=None)
    other = [replace(run, config=replace(run.config, task="digits"), info=plain) for run in runs]
    assert compare(other)[0].gap == Gap(0.04, "1 % of rr's loss")
    assert compare(runs[2:])[0].gap is None
    against_ours = compare(runs, rival="cd-grab")[0].gap
    assert against_ours == Gap(0.5, "half of cd-grab's distance to the minimum")


def test_a_comparison_by_hand() -> None:
    (comparison,) = compare(two_seeds())
    rr, ours = comparison.rows
    assert (comparison.title, comparison.notes) == ("hmda, 4 workers", [])
    assert [row.contender for row in comparison.rows] == ["rr", "cd-grab"]
    assert ours.final == Estimate.of([1.5, 2.5])
    assert ours.above == Estimate.of([0.5, 1.5])
    assert ours.metric is not None
    assert ours.metric.mean == pytest.approx(0.9 - 0.3 * 2.0)
    assert ours.epochs == Estimate.of([1.0, 2.0])
    assert ours.seconds == Estimate.of([3.0, 6.0])
    assert ours.epochs_ratio == Estimate.of([0.25, 0.5])
    assert ours.seconds_ratio == Estimate.of([3 / 8, 6 / 8])
    assert ours.pace == Estimate.of([1.5, 1.5])
    assert (ours.reached, ours.tried) == (2, 2)
    assert ours.difference == Estimate.of([1.5 - 4, 2.5 - 4])
    assert rr.epochs_ratio == Estimate.of([1.0, 1.0])


def test_a_seed_that_never_gets_there_is_counted_not_hidden() -> None:
    runs = [*two_seeds()[:3], made_run([8, 7, 7, 7, 7], order="cd-grab", seed=1)]
    ours = compare(runs)[0].rows[1]
    assert (ours.reached, ours.tried) == (1, 2)
    assert ours.difference == Estimate.of([1.5 - 4, 7.0 - 4])
    assert ours.epochs_ratio == Estimate.of([0.25])


def test_a_stopped_run_counts_as_one_that_never_got_there() -> None:
    runs = two_seeds()
    runs[3] = replace(runs[3], epochs=runs[3].epochs[:3], info=replace(runs[3].info, stopped="the loss is NaN"))
    (comparison,) = compare(runs)
    ours = comparison.rows[1]
    assert (ours.seeds, ours.diverged, ours.reached, ours.tried) == ([0], [1], 1, 2)
    assert ours.final == Estimate.of([1.5])
    assert "cd-grab, seed 1: stopped after 2 of 4 epochs (the loss is NaN)." in comparison.notes


def test_a_run_that_ends_in_nan_has_diverged() -> None:
    runs = [*two_seeds()[:3], made_run([8, 7, 7, 7, math.nan], order="cd-grab", seed=1)]
    (comparison,) = compare(runs)
    assert comparison.rows[1].diverged == [1]
    assert any("the loss is not a number" in note for note in comparison.notes)


def test_an_unfinished_run_is_left_out_and_named() -> None:
    runs = two_seeds()
    runs[2] = replace(runs[2], epochs=runs[2].epochs[:2])
    runs.append(replace(made_run([1, 1], order="pair"), epochs=[], config=replace(runs[0].config, order="pair")))
    (comparison,) = compare(runs)
    assert comparison.rows[1].seeds == [1]
    assert "cd-grab, seed 0: not finished, 1 of 4 epochs; left out of the table." in comparison.notes
    pair = comparison.row("pair")
    assert pair is not None
    assert (pair.final, pair.tried) == (None, 0)


def test_without_a_rival_figures_stand_alone() -> None:
    (comparison,) = compare(two_seeds()[2:])
    (ours,) = comparison.rows
    assert (ours.tried, ours.epochs_ratio, ours.pace) == (0, None, None)
    assert ours.final == Estimate.of([1.5, 2.5])
    assert any("no run of rr" in note for note in comparison.notes)


def test_a_rival_that_did_not_finish_sets_no_target() -> None:
    runs = two_seeds()
    runs[0] = replace(runs[0], epochs=runs[0].epochs[:3])
    runs[1] = replace(runs[1], epochs=runs[1].epochs[:3])
    (comparison,) = compare(runs)
    assert comparison.rows[1].tried == 0
    assert any("No run of rr has gone through" in note for note in comparison.notes)


def test_only_seeds_in_common_are_compared() -> None:
    (comparison,) = compare(two_seeds()[:3])
    assert comparison.rows[1].tried == 1
    assert any("Finished seeds differ (rr: 0, 1; cd-grab: 0)" in note for note in comparison.notes)


def test_what_weakens_the_figures_is_said() -> None:
    one = compare([two_seeds()[0], two_seeds()[2]])[0]
    assert any(note.startswith("One seed") for note in one.notes)
    runs = two_seeds()
    runs[0] = replace(runs[0], info=replace(runs[0].info, environment={"hardware": "another"}))
    assert any("different hardware" in note for note in compare(runs)[0].notes)
    assert any("more than once" in note for note in compare([*two_seeds(), two_seeds()[0]])[0].notes)


def test_settings_with_the_same_title_are_told_apart() -> None:
    comparisons = compare([made_run([2, 1], lr=0.1), made_run([2, 1], lr=0.2), made_run([2, 1], workers=8)])
    titles = ["hmda, 4 workers, lr 0.1", "hmda, 4 workers, lr 0.2", "hmda, 8 workers"]
    assert [comparison.title for comparison in comparisons] == titles


def test_rules_and_sources_are_contenders_of_their_own() -> None:
    runs = [made_run([2, 1]), made_run([2, 1], order="cd-grab", source="sketch:64")]
    runs += [made_run([2, 1], order="cd-grab", rule="walk"), made_run([2, 1], order="cd-grab")]
    names = ["rr", "cd-grab", "cd-grab (walk)", "cd-grab, sketch of 64"]
    assert [row.contender for row in compare(runs)[0].rows] == names


def test_lines_are_mean_and_range_of_finished_runs() -> None:
    runs = {run.config.seed: run for run in two_seeds()[2:]}
    line = curve(runs)
    assert line is not None
    assert line.loss.mean.tolist() == [8, 5, 3.5, 2.5, 2]
    assert (line.loss.low[1], line.loss.high[1], line.seconds[1]) == (4, 6, 3)
    assert line.above is not None
    assert line.above.mean[-1] == 1.0
    runs[1] = replace(runs[1], epochs=runs[1].epochs[:2])
    short = curve(runs)
    assert short is not None
    assert (short.seeds, short.loss.mean.tolist()) == ([0], [8, 4, 3, 2, 1.5])
    assert curve({0: replace(runs[0], epochs=[])}) is None


def test_time_split_is_per_epoch() -> None:
    split = time_split({run.config.seed: run for run in two_seeds()[2:]})
    assert split is not None
    assert split["forward, backward, step"] == pytest.approx(2.4)
    assert sum(split.values()) == pytest.approx(3.0)
    assert time_split({0: made_run([2, 1], pace=0.0)}) is None


def test_made_up_experiments_are_shaped_like_the_paper() -> None:
    (comparison,) = compare(made_experiment(seeds=3))
    ours = comparison.row("cd-grab")
    assert ours is not None
    assert ours.epochs_ratio is not None
    assert ours.epochs_ratio.mean < 0.2

"""Records and states that are damaged, edited or hostile: named, left out, and never overwritten."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from _runs import INFO, made_experiment, made_run
from cdgrab_experiments import cli, records, runner
from cdgrab_experiments.choices import Choices, resolve
from cdgrab_experiments.compare import compare
from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.interrupts import interruptible
from cdgrab_experiments.markdown import markdown
from cdgrab_experiments.records import EpochRecord, load, load_readable
from cdgrab_experiments.report import write_report
from cdgrab_experiments.runner import Interrupted, Place, run
from cdgrab_experiments.saved_state import read_state
from cdgrab_experiments.whole_files import write_whole


def chosen(**changes: Any) -> RunConfig:
    return resolve("digits", Choices(**{"epochs": 4, "seed": 1, **changes}))


def after(epoch: int) -> Callable[[EpochRecord], None]:
    def stop(record: EpochRecord) -> None:
        if record.epoch == epoch:
            raise KeyboardInterrupt

    return stop


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete run on disk."""
    folder = tmp_path / "results" / "run"
    records.save(folder, made_run([2.0, 1.5, 1.25, 1.125]))
    return folder


def edited(lines: list[str]) -> list[str]:
    return [lines[0], lines[1].replace('"loss": 1.5', '"loss": 1.4'), *lines[2:]]


def without_digest(lines: list[str]) -> list[str]:
    return [lines[0], re.sub(r', "digest": "\w+"', "", lines[1]), *lines[2:]]


EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "the first line is lost": lambda lines: lines[1:],
    "a line is lost": lambda lines: [*lines[:1], *lines[2:]],
    "the last line is lost": lambda lines: lines[:-1],
    "all are lost": lambda _: [],
    "two are swapped": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "one is there twice": lambda lines: [*lines[:2], *lines[1:]],
    "one is edited": edited,
    "one has no digest": without_digest,
    "one is cut short": lambda lines: [*lines[:-1], lines[-1][:-9]],
}


@pytest.mark.parametrize("what", EDITS)
def test_lines_that_were_lost_swapped_or_edited_are_noticed(what: str, saved: Path) -> None:
    file = saved / "epochs.jsonl"
    file.write_text("".join(f"{line}\n" for line in EDITS[what](file.read_text().splitlines())))
    with pytest.raises(ValueError, match=r"epochs.jsonl.*restore its files from a copy, or remove the folder"):
        load(saved)


@pytest.mark.parametrize("what", ["a line is lost", "two are swapped", "one is edited", "one has no digest"])
def test_lines_of_a_run_under_way_are_checked_alike(what: str, tmp_path: Path) -> None:
    """Its `run.json` has no digest of the last line yet."""
    begun = made_run([2.0, 1.5, 1.25, 1.125, 1.0, 0.9])
    records.save(tmp_path, replace(begun, epochs=begun.epochs[:4]))
    assert len(load(tmp_path).epochs) == 4
    file = tmp_path / "epochs.jsonl"
    file.write_text("".join(f"{line}\n" for line in EDITS[what](file.read_text().splitlines())))
    with pytest.raises(ValueError, match=r"line 2 of epochs\.jsonl: it does not follow from the lines before"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["config", "data", "minimum", "environment", "stopped"])
def test_an_edited_head_is_noticed(key: str, saved: Path) -> None:
    head = json.loads((saved / "run.json").read_text())
    head[key] = {**head[key], "seed": 5} if key == "config" else {} if key == "environment" else None
    if key == "data":
        head[key] = "other data"
    elif key == "minimum":
        head[key] = 0.5
    elif key == "stopped":
        head[key] = "too slow"
    (saved / "run.json").write_text(json.dumps(head))
    with pytest.raises(ValueError, match="edited"):
        load(saved)


def test_records_of_another_run_are_noticed(saved: Path, tmp_path: Path) -> None:
    records.save(tmp_path / "other", made_run([2.0, 1.5, 1.25, 1.125], seed=1))
    (saved / "epochs.jsonl").write_bytes((tmp_path / "other" / "epochs.jsonl").read_bytes())
    with pytest.raises(ValueError, match="lost, swapped or edited"):
        load(saved)


def unsigned(folder: Path) -> None:
    """Records as releases before 0.2.0 wrote them."""
    for name in ("epochs.jsonl", "run.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(re.sub(r',\s+"digest": "\w+"', "", text))


def test_records_of_older_releases_are_read(saved: Path) -> None:
    before = load(saved)
    unsigned(saved)
    assert "digest" not in (saved / "epochs.jsonl").read_text() + (saved / "run.json").read_text()
    assert load(saved) == before
    head = json.loads((saved / "run.json").read_text())
    (saved / "run.json").write_text(json.dumps({**head, "environment": {"cdgrab": "0.2.0"}}))
    with pytest.raises(ValueError, match="no digests, which records have since"):
        load(saved)
    (saved / "run.json").write_text(json.dumps(head))
    lines = (saved / "epochs.jsonl").read_text().splitlines(True)
    (saved / "epochs.jsonl").write_text("".join([lines[0], *lines[2:]]))  # the sequence of epochs shows at least that
    with pytest.raises(ValueError, match=r"line 2 of epochs\.jsonl"):
        load(saved)


# What a field may hold if somebody means harm. Whatever JSON can spell must be read or refused, and never worse.
HOSTILE: list[Any] = [
    None, True, -1, 0, 10**400, 2**60, 1e308, -1e308, "", "x" * 5000, "\ud800", "\x1b[31m", "a\nb", r"$\frac{1$",
    "</script><script>alert(1)</script>", "| a | b |", "[x](javascript:alert(1))", "[/red]", "\u202eabc",
    "\u65e5\u672c", [], ["a", None], [[]], {}, {"a": {"b": [1]}}, {"before": 3}, [{"runs at a time": "x"}],
]  # fmt: skip


def leaves(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = [leaf for key in found for leaf in leaves(found[key], (*path, key))] if isinstance(found, dict) else []
    return [path, *inner] if path else inner


def with_value(found: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(found)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def test_no_field_of_a_record_breaks_the_comparison(saved: Path) -> None:
    """Every field with every hostile value: the run is read, or a line says why not; then tables can be made."""
    unsigned(saved)  # so that the digest does not refuse everything at once
    head, lines = json.loads((saved / "run.json").read_text()), (saved / "epochs.jsonl").read_text().splitlines()
    line = json.loads(lines[-1])
    read = 0
    for value in HOSTILE:
        cases = [(with_value(head, path, value), line) for path in leaves(head)]
        cases += [(head, with_value(line, path, value)) for path in leaves(line)]
        for changed_head, changed_line in [*cases, (value, line), (head, value)]:
            (saved / "run.json").write_text(json.dumps(changed_head))
            (saved / "epochs.jsonl").write_text("\n".join([*lines[:-1], json.dumps(changed_line)]) + "\n")
            runs, damaged = load_readable(saved.parent)
            assert len(runs) + len(damaged) == 1
            assert all(line.isprintable() for line in damaged)
            read += len(runs)
            markdown(compare(runs)).encode()
    assert read > 100  # names may be anything that can be printed


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "3", "[" * 100_000, '{"a":' * 100_000, '{"config": NaN}', '{"config": {}}', "\x00"]
)
@pytest.mark.parametrize("name", ["run.json", "epochs.jsonl"])
def test_no_file_of_a_record_breaks_the_reading(name: str, text: str, saved: Path) -> None:
    (saved / name).write_text(text)
    assert len(load_readable(saved.parent)[1]) == 1


def test_files_that_are_none_are_no_records(saved: Path) -> None:
    (saved / "epochs.jsonl").unlink()
    os.mkfifo(saved / "epochs.jsonl")  # whoever reads it waits for ever
    (saved.parent / "other" / "run.json").mkdir(parents=True)
    runs, damaged = load_readable(saved.parent)
    assert (len(runs), len(damaged)) == (0, 2)


NAMES = [
    r"$\frac{1$",
    "</td><script>alert(1)</script>",
    "| a | [x](http://y.z) `b` *c* _d_ |",
    "__init__",
    "# - 1. x",
    "日本",
]


def test_hostile_names_make_a_report(tmp_path: Path) -> None:
    """Page, table and figures."""
    name = " ".join(NAMES)
    info = replace(INFO, metric=name, data=name, environment={name: name})
    for number, order in enumerate(("rr", *NAMES)):
        for workers in (4, 8):
            made = made_run([2, 1, 0.5], info=info, task=name, order=order, workers=workers, partition=name)
            records.save(tmp_path / "runs" / f"{number}-{workers}", made)
    page = write_report(tmp_path / "runs", tmp_path / "out")
    assert "<script>alert" not in page.read_text()
    assert len(list((tmp_path / "out" / "figures").glob("*.png"))) == 5
    text = (tmp_path / "out" / "comparison.md").read_text()
    for pattern in (r"(?<!\\)<", r"(?<!\\)\[", r"(?<!\\)`", r"(?<!\\)\*", r"http://", r"(?<![\\\w])_", r"(?<!\\)\$"):
        assert not re.search(pattern, text), pattern
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_losses_too_large_to_add_make_a_report(tmp_path: Path) -> None:
    for seed in range(2):
        for order in ("rr", "cd-grab"):
            run = made_run([2, 1e300, 1.7e308], order=order, seed=seed)
            run = replace(run, epochs=[replace(r, metrics={"accuracy": 1e308}, imbalance=1e308) for r in run.epochs])
            records.save(tmp_path / f"{order}{seed}", run)
    assert write_report(tmp_path, tmp_path / "out").exists()


def test_one_damaged_run_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in made_experiment(seeds=2, epochs=3, orders=("rr", "cd-grab")):
        records.save(tmp_path / "runs" / made.config.folder_name, made)
    bad = next((tmp_path / "runs").glob("cd-grab*seed1*"))
    (bad / "run.json").write_text("null")
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert f"Left out: {bad} holds no run that can be read" in said.out
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "| rr (2 seeds) |" in text
    assert "| cd-grab (1 seed) |" in text
    assert "## Left out" in text
    assert bad.name in (tmp_path / "out" / "report.html").read_text()
    assert (bad / "run.json").read_text() == "null"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.raises(Interrupted):
        run(chosen(), Place(folder, folder), on_epoch=after(2))
    return folder


@pytest.fixture
def interrupted(once: Path, tmp_path: Path) -> Path:
    """The folder of a run that was interrupted, to be spoilt."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path, tmp_path).folder(chosen())


def test_no_flipped_bit_of_a_state_passes_unnoticed(interrupted: Path) -> None:
    """What loads in spite of it is the same state."""
    state = interrupted / "state.pt"
    whole, before = state.read_bytes(), read_state(state)
    draws = random.Random(0)
    refused = 0
    for _ in range(150):
        place = draws.randrange(len(whole))
        state.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draws.randrange(8)]) + whole[place + 1 :])
        try:
            found = read_state(state)
        except ValueError:
            refused += 1
        else:
            assert str(found) == str(before)
            weights = zip(found["model"].values(), before["model"].values(), strict=True)
            assert all(torch.equal(one, other) for one, other in weights)
    assert refused > 100
    for length in range(0, len(whole), len(whole) // 20):
        state.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            read_state(state)


@pytest.mark.parametrize("key", ["trained", "where", "model", "optimizer", "scheduler", "ordering"])
@pytest.mark.parametrize("value", [None, "x", -1, {}, {"config": []}, "absent"])
def test_an_edited_state_is_refused_and_kept(key: str, value: Any, interrupted: Path, tmp_path: Path) -> None:
    file = interrupted / "state.pt"
    state = torch.load(file, weights_only=True)
    state[key] = value
    if value == "absent":
        del state[key]
    torch.save(state, file)
    before = content(tmp_path)
    with pytest.raises(ValueError, match=r"remove the folder|go on as before"):
        run(chosen(), Place(tmp_path, tmp_path))
    assert content(tmp_path) == before


@pytest.mark.parametrize("lost", ["state.pt", "run.json", "epochs.jsonl"])
def test_a_lost_file_is_noticed_and_nothing_overwritten(lost: str, interrupted: Path, tmp_path: Path) -> None:
    (interrupted / lost).unlink()
    before = content(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(interrupted))):
        run(chosen(), Place(tmp_path, tmp_path))
    assert content(tmp_path) == before


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path)
    run(chosen(), place)
    place.folder(chosen()).rename(place.folder(chosen(seed=2)))
    with pytest.raises(ValueError, match="holds another run than its name says"):
        run(chosen(seed=2), place)


@pytest.mark.parametrize("when", ["epochs.jsonl", "run.json", "state.pt"])
def test_a_request_to_end_in_a_save_is_kept_until_it_is_done(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the final save, and (for the state) in the save that the first request caused."""
    straight = run(chosen(), Place(tmp_path / "straight", tmp_path))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    write, real_fsync, names = write_whole, os.fsync, []

    def slow(path: Path, what: Any) -> None:
        names.append(path.name)
        write(path, what)

    def asked(number: int) -> None:
        real_fsync(number)
        if names[-1] == when and len(names) > 3:  # not the first save
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(records, "write_whole", slow)
    monkeypatch.setattr("cdgrab_experiments.saved_state.write_whole", slow)
    monkeypatch.setattr(os, "fsync", asked)
    try:
        interruptible()
        with pytest.raises(Interrupted, match="are saved in"):
            run(
                chosen(),
                Place(tmp_path / "asked", tmp_path),
                on_epoch=after(2) if when == "state.pt" else lambda _: None,
            )
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    found = runner.find_run(chosen(), Place(tmp_path / "asked", tmp_path))
    assert found is not None
    assert found.complete == (when != "state.pt")
    monkeypatch.undo()
    interruptible_again = run(chosen(), Place(tmp_path / "asked", tmp_path))
    assert [r.loss for r in interruptible_again.epochs] == [r.loss for r in straight.epochs]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".partial", ".pt", ".lock")]

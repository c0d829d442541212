"""The machinery of `python -m tests.mutate`, on a library of two lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mutate
from _mutations import MUTATIONS, Mutation

SOURCE = """\
def double(x):
    y = 2 * x
    return y


class Half:
    def of(self, x):
        y = x / 2
        return y
"""
CASES = """\
from toy import Half, double

def test_double():
    assert double(2) == 4

def test_half():
    assert Half().of(4) == 2
"""
FAULT = Mutation("adds", "toy.py", "double", "y = 2 * x", "y = 3 * x", ("test_toy.py",), "Doubling would triple.")
UNSEEN = replace(FAULT, name="unseen", mutated="y = 2 + x")  # the same for the only number that is looked at
MISSING = replace(FAULT, name="missing", original="y = 4 * x")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "toy.py").write_text(SOURCE)
    (tmp_path / "test_toy.py").write_text(CASES)
    return tmp_path


def test_faults_are_killed_and_the_checkout_stays_as_it_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.report([FAULT], root=root) == 0
    assert "1 mutations, 0 not killed" in capsys.readouterr().out
    assert sorted(path.name for path in root.rglob("*")) == ["src", "test_toy.py", "toy.py"]
    assert (root / "src" / "toy.py").read_text() == SOURCE


def test_survivors_and_missing_lines_are_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.report([UNSEEN, MISSING], root=root) == 1
    said = capsys.readouterr().out
    assert "survived: unseen, in toy.py\n  - y = 2 * x\n  + y = 2 + x\n  Doubling would triple." in said
    assert "found 0 times in toy.py, double, expected once: y = 4 * x" in said
    assert "2 mutations, 2 not killed" in said
    assert "without any mutation" not in said


def test_tests_that_fail_anyway_kill_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "test_toy.py").write_text(CASES + "\ndef test_wrong():\n    assert double(1) == 3\n")
    assert mutate.report([FAULT], root=root) == 1
    assert "the tests fail without any mutation" in capsys.readouterr().out
    assert mutate.outcome_of(replace(FAULT, tests=("test_gone.py",)), root).verdict == "broken"


def test_a_line_is_looked_for_where_it_is_said_to_be() -> None:
    returns = replace(FAULT, original="return y", mutated="return -y", inside="Half.of")
    assert mutate.spoilt(SOURCE, returns) == SOURCE[:-9] + "return -y\n"
    for inside in ("", "Half.off"):
        with pytest.raises(LookupError, match=f"found {2 if inside == '' else 0} times"):
            mutate.spoilt(SOURCE, replace(returns, inside=inside))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_has_its_line_and_its_tests(mutation: Mutation) -> None:
    source = (mutate.ROOT / "src" / mutation.file).read_text()
    compile(mutate.spoilt(source, mutation), mutation.file, "exec")
    assert mutation.mutated != mutation.original
    assert sum(one.name == mutation.name for one in MUTATIONS) == 1
    for test in mutation.tests:
        assert (mutate.ROOT / test.split("::")[0]).is_file()

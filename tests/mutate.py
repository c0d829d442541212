"""Spoils one line of the library at a time: `python -m tests.mutate`. Tests that still pass would let the fault in.

Every mutation of `_mutations.py` is made in a copy of `src`, which comes first on the path of the tests that should
notice; the checkout stays as it is. All tests also run once on a copy that nothing is done to.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _mutations import Mutation

ROOT = Path(__file__).parents[1]
LIMIT = 180  # seconds for the tests of one mutation; those of all of them may take ten times as long
PYTEST = ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation.

    Attributes:
        verdict: `"killed"` and `"survived"` say what the tests did. `"missing"`: the line is not there exactly once.
            `"broken"`: the tests did not run to their end, so that they say nothing.
        detail: The end of what was printed, or what is missing.
    """

    verdict: str
    seconds: float = 0.0
    detail: str = ""


def spoilt(source: str, mutation: Mutation) -> str:
    """The source with the line changed, at its indentation; raises `LookupError` unless it is there exactly once."""
    lines = source.splitlines(keepends=True)
    found = [number for number in _span(source, mutation.inside) if lines[number].strip() == mutation.original]
    if len(found) != 1:
        place = f"{mutation.file}, {mutation.inside}" if mutation.inside else mutation.file
        raise LookupError(f"found {len(found)} times in {place}, expected once: {mutation.original}")
    [number] = found
    lines[number] = lines[number].replace(mutation.original, mutation.mutated)
    return "".join(lines)


def _span(source: str, inside: str) -> range:
    """The lines of a function or class, by its qualified name; all lines without one."""
    node: ast.AST = ast.parse(source)
    for name in filter(None, inside.split(".")):
        named = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name]
        if len(named) != 1:
            return range(0)
        [node] = named
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return range(node.lineno - 1, node.end_lineno or 0)
    return range(len(source.splitlines()))


def outcome_of(mutation: Mutation, root: Path = ROOT) -> Outcome:
    """Run the tests of a mutation on a copy of `root/src` with it."""
    with _copied(root) as source:
        file = source / mutation.file
        try:
            file.write_text(spoilt(file.read_text(), mutation))
        except (LookupError, OSError) as error:
            return Outcome("missing", detail=str(error))
        return _run(mutation.tests, source, root, LIMIT)


def outcome_without(mutations: Sequence[Mutation], root: Path = ROOT) -> Outcome:
    """Run all tests of these mutations on a copy that nothing is done to; they must survive that."""
    with _copied(root) as source:
        return _run(sorted({test for mutation in mutations for test in mutation.tests}), source, root, 10 * LIMIT)


@contextmanager
def _copied(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        yield shutil.copytree(root / "src", Path(folder) / "src", ignore=leave_out)


def _run(tests: Sequence[str], source: Path, root: Path, limit: float) -> Outcome:
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
    }
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *PYTEST, *tests],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome("broken", limit, f"the tests took more than {limit} seconds")
    verdict = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    return Outcome(verdict, time.perf_counter() - start, done.stdout[-3000:])


def report(mutations: Sequence[Mutation], *, jobs: int = 2, root: Path = ROOT) -> int:
    """Run all of them, print a line for each and what is wrong at the end; returns the exit code."""
    start = time.perf_counter()
    outcomes: dict[Mutation, Outcome] = {}
    with ThreadPoolExecutor(jobs) as pool:
        plain = pool.submit(outcome_without, mutations, root)
        runs: dict[Future[Outcome], Mutation] = {pool.submit(outcome_of, one, root): one for one in mutations}
        for run in as_completed(runs):
            mutation, outcome = runs[run], run.result()
            outcomes[mutation] = outcome
            print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {mutation.name}", flush=True)
    wrong = [mutation for mutation in mutations if outcomes[mutation].verdict != "killed"]
    for mutation in wrong:
        outcome = outcomes[mutation]
        print(f"\n{outcome.verdict}: {mutation.name}, in {mutation.file}\n  - {mutation.original}")
        print(f"  + {mutation.mutated}\n  {mutation.breaks}\n  tests: {' '.join(mutation.tests)}")
        if outcome.verdict != "survived":
            print(outcome.detail)
    sound = plain.result().verdict == "survived"
    if not sound:
        print(f"\nthe tests fail without any mutation, so the above says nothing:\n{plain.result().detail}")
    print(f"\n{len(mutations)} mutations, {len(wrong)} not killed, {time.perf_counter() - start:.0f} s")
    return int(bool(wrong) or not sound)


def main() -> int:
    """The command line."""
    sys.path.insert(0, str(Path(__file__).parent))
    from _mutations import MUTATIONS

    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description="Do the tests notice faults?")
    parser.add_argument("--only", metavar="NAME", action="append", help="this mutation only; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many to try side by side (default: 2)")
    parser.add_argument("--list", action="store_true", help="say what each of them would break, and run nothing")
    arguments = parser.parse_args()
    unknown = {*(arguments.only or [])} - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"there is no mutation {', '.join(sorted(unknown))}; --list names all")
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; it must be at least 1")
    chosen = [mutation for mutation in MUTATIONS if not arguments.only or mutation.name in arguments.only]
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.breaks}")
        return 0
    return report(chosen, jobs=arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())

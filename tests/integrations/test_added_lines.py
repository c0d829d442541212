"""How many lines each tool's example needs for the order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("with_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_at_most_three_lines_are_added(path: Path) -> None:
    lines = path.read_text().splitlines()
    marked = [line.strip() for line in lines if re.search(r"#.*\bcdgrab\b", line)]
    print(f"{path.stem}: {len(marked)} added lines of {len(lines)}", *marked, sep="\n    ")
    assert 1 <= len(marked) <= 3
    assert len(lines) <= 60
    for line in lines:  # what makes or changes an ordering is marked
        makes = re.search(r"cdgrab\.|import.*cdgrab|ordering =|ordering,|attach\(", line)
        assert line.strip() in marked or not makes, line


def test_the_page_shows_the_imports_of_the_examples() -> None:
    page = (EXAMPLES[0].parents[1] / "docs" / "integrations.md").read_text()
    for path in EXAMPLES:
        assert path.name in page
        [added] = re.findall(r"^(from cdgrab\.integrations.*?)  # cdgrab", path.read_text(), flags=re.MULTILINE)
        assert f"+ {added}\n" in page

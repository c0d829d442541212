"""The pages as text: links lead somewhere, and the README stays short."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


def without_code(text: str) -> str:
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", fenced, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a heading is called in an address, as forges have it."""
    headings = re.findall(r"^#+ +(.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset|href)="([^"]+)"', text)]
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), f"{link}: {sorted(anchors(target))}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """As `make docs` asks; here without building it."""
    docs = ROOT / "docs"
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    made = {name for name in named if name.startswith("repository/")} | {"reference/cli.md"}
    assert named - made == there


def readme() -> list[str]:
    """The paragraphs of the README: no code, no tables, no tags, and of links only what is read."""
    text = without_code((ROOT / "README.md").read_text())
    text = re.sub(r"<[^>]+>", "", re.sub(r"^\|.*$", "", text, flags=re.MULTILINE))
    return re.split(r"\n(?:\s*\n|(?=- ))", re.sub(r"\]\([^)]*\)", "]", text))


def test_the_readme_is_short_and_has_few_figures() -> None:
    paragraphs = readme()
    words = [word for paragraph in paragraphs for word in paragraph.split() if re.search(r"\w", word)]
    figures = [word for word in words if re.match(r"\W*\d", word)]
    assert 200 < len(words) <= 900
    assert len(figures) <= 0.025 * len(words), figures
    assert max(len(paragraph.split()) for paragraph in paragraphs) <= 80


def test_the_table_of_the_readme_is_short_and_shows_where_nothing_is_gained() -> None:
    rows = re.findall(r"^\|.*\|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[2:]
    assert len(rows) <= 6
    assert any(re.search("no gain|cannot tell", row) for row in rows)


def test_the_readme_cites_what_the_citation_file_names() -> None:
    cited = (ROOT / "README.md").read_text()
    told = (ROOT / "CITATION.cff").read_text()
    for address in re.findall(r"url: (\S+)", told):
        assert address in cited
    version = re.search(r"^version: (\S+)$", told, flags=re.MULTILINE)
    assert version is not None
    assert f"version = {{{version[1]}}}" in cited


def test_no_page_is_left_out_of_the_repository() -> None:
    """A page that git ignores would be there for its author alone."""
    done = subprocess.run(
        ["git", "check-ignore", *map(str, PAGES)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


def test_the_table_of_models_has_those_that_are_tested() -> None:
    tested = (ROOT / "tests" / "unit" / "per_example" / "test_models_of_others.py").read_text()
    expected = re.findall(r'^    "([^"]+)": \(.*, ([\d.]+)\),', tested, flags=re.MULTILINE)
    page = (ROOT / "docs" / "integrations.md").read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    shown: dict[str, float] = {}
    for families, shares in re.findall(r"^\| (\w.*?) \| ([\d., ]+) \|", page, flags=re.MULTILINE):
        names, numbers = families.split(", "), [float(share) for share in shares.split(", ")]
        shown |= dict(zip(names, numbers * len(names) if len(numbers) == 1 else numbers, strict=True))
    assert shown == {name: pytest.approx(float(share), abs=0.0051) for name, share in expected}

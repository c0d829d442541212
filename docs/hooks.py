"""What mkdocs does not do by itself: a page of the command, and pages for files outside of `docs/`.

A page in `docs/` links to files as they lie in the repository, so that links work in a forge and in an editor. On the
site such a file becomes a page under `repository/`, and links are changed to match. Links to folders become text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ALWAYS = ["CHANGELOG.md", "CONTRIBUTING.md"]
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".cff": "yaml"}

FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:]+)\)")


def target_of(link: str, source: Path) -> Path:
    """The file or folder of the repository that a relative link of the file `source` leads to."""
    return Path(posixpath.normpath(posixpath.join(source.parent.as_posix(), link)))


def address(path: Path) -> str:
    """The path on the site, under `docs/`, of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path == ROOT / "README.md":
        return "index.md"
    inside = path.relative_to(ROOT).as_posix()
    return f"repository/{inside}" if path.suffix == ".md" else f"repository/{inside}.md"


def with_links(text: str, change: Callable[[re.Match[str]], str]) -> str:
    """`text` with every relative link outside of code changed."""
    parts = FENCED.split(text)
    return "".join(part if i % 2 else LINK.sub(change, part) for i, part in enumerate(parts))


def adapted(text: str, source: Path, here: str) -> str:
    """The text of the file `source` as the page `here`, with links to match."""

    def change(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        path, _, anchor = link.partition("#")
        if not path:
            return match[0]
        target = target_of(path, source)
        if target.is_dir():
            return f"{label} (`{target.relative_to(ROOT).as_posix()}`)"
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]  # mkdocs names it
        there = posixpath.relpath(address(target), posixpath.dirname(here) or ".")
        return f"{mark}[{label}]({there}{'#' * bool(anchor)}{anchor})"

    return with_links(text, change)


def content(path: Path) -> str:
    """A file of the repository as a page."""
    if path.suffix == ".md":
        return adapted(path.read_text(), path, address(path))
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def linked(path: Path) -> list[Path]:
    """The files outside of `docs/` that a page links to."""
    found: list[Path] = []

    def note(match: re.Match[str]) -> str:
        target = target_of(match[3].partition("#")[0], path)
        if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS):
            found.append(target)
        return match[0]

    with_links(path.read_text(), note)
    return found


def commands() -> str:
    """The page of the command `cdgrab`, from the command itself."""
    import typer

    from cdgrab_experiments.cli import app

    group: Any = typer.main.get_command(app)
    page = f"# The command `cdgrab`\n\n{group.help} It comes with the extra `experiments`.\n\n{group.epilog}\n"
    for name, command in sorted(group.commands.items()):
        page += f"\n## cdgrab {name}\n\n{command.help}\n\n| argument | default | |\n|---|---|---|\n"
        for option in command.params:
            shown = ", ".join(o for o in option.opts if o.startswith("-")) or option.name.upper()
            usual = "" if option.default in (None, False, [], ()) or callable(option.default) else f"`{option.default}`"
            page += f"| `{shown}` | {usual} | {(getattr(option, 'help', '') or '').replace('|', '&#124;')} |\n"
        page += f"\n{command.epilog}\n" if command.epilog else ""
    return re.sub(r"^(Example: )(.*)$", r"\1`\2`", page, flags=re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the page of the command, and one for every file outside of `docs/` that can be reached by links."""
    waiting = [ROOT / name for name in ALWAYS]
    waiting += [target for path in DOCS.rglob("*.md") for target in linked(path)]
    files.append(File.generated(config, "reference/cli.md", content=commands()))
    done = {ROOT / "README.md"}
    while waiting:
        path = waiting.pop()
        if path not in done:
            done.add(path)
            files.append(File.generated(config, address(path), content=content(path)))
            waiting += linked(path) if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links of pages in `docs/` that leave it."""
    uri: str = page.file.src_uri
    return markdown if uri.startswith("repository/") else adapted(markdown, DOCS / uri, uri)

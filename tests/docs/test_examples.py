"""Code in the documentation runs as it stands."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import cdgrab

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(cdgrab.__path__, "cdgrab.")
    if not module.name.startswith("cdgrab_experiments")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    if ".triton_" in name and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    tool = name.removeprefix("cdgrab.integrations.")
    if tool in ("accelerate", "fabric", "lightning", "ray", "transformers"):
        pytest.importorskip("lightning" if tool == "fabric" else tool)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


PAGES = [
    path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "```python" in path.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The python blocks of a page, run one after the other as one program."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})


def changed(page: Path, sign: str) -> dict[str, Any]:
    """What the one diff of a page leaves behind, run with its lines before (`-`) or after (`+`) the change."""
    (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = [line[2:] for line in diff.splitlines() if line[:1] in (" ", sign, "")]
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(lines), str(page), "exec"), found)
    return found


def test_the_change_that_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The loop trains with the added lines and without. With them its order is balanced from the second epoch on."""
    assert "ordering" not in changed(ROOT / "README.md", "-")
    assert capsys.readouterr().out == ""
    found = changed(ROOT / "README.md", "+")
    assert found["ordering"].epoch == 5
    shown = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [figures["epoch"] for figures in shown] == [0, 1, 2, 3, 4]
    assert all(figures["imbalance"] < 0.5 for figures in shown[1:])

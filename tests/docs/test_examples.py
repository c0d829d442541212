"""Code in the documentation runs as it stands."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

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
def test_pages(page: Path) -> None:
    """The python blocks of a page, run one after the other as one program."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})

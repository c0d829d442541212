from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import cdgrab

SOURCE = Path(cdgrab.__file__).parent


def test_import_pulls_in_torch_and_numpy_only() -> None:
    heavy = ["numba", "scipy", "sklearn", "matplotlib", "rich", "typer", "pandas", "transformers", "triton"]
    code = f"import torch, sys; old = set(sys.modules); import cdgrab; print(*(set(sys.modules) - old) & set({heavy}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_library_never_imports_the_experiments() -> None:
    for path in SOURCE.rglob("*.py"):
        if path != SOURCE / "__main__.py":  # the command, which starts them
            assert "cdgrab_experiments" not in path.read_text(), path


def test_the_experiments_use_public_names_only() -> None:
    public = {module.__name__: module.__all__ for module in (cdgrab, cdgrab.sources, cdgrab.factors)}
    for path in (SOURCE.parent / "cdgrab_experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cdgrab":
                assert {alias.name for alias in node.names} <= set(public[node.module]), path
            elif isinstance(node, ast.Import):
                assert all(alias.name == "cdgrab" or alias.name.split(".")[0] != "cdgrab" for alias in node.names), path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert not (node.value.id in ("ordering", "cdgrab") and node.attr.startswith("_")) or (
                    node.attr == "__version__"
                ), path


def test_everything_public_exists() -> None:
    for name in cdgrab.__all__:
        assert hasattr(cdgrab, name)


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()

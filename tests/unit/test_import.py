from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cdgrab

SOURCE = Path(cdgrab.__file__).parent


def test_import_pulls_in_torch_and_numpy_only() -> None:
    heavy = ["numba", "scipy", "sklearn", "matplotlib", "rich", "typer", "pandas", "transformers"]
    code = f"import torch, sys; old = set(sys.modules); import cdgrab; print(*(set(sys.modules) - old) & set({heavy}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_library_never_imports_the_experiments() -> None:
    apart = ("paper", "theory", "__main__.py")  # experiments, and the command that starts them
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in apart:
            assert not re.search(r"cdgrab\.(paper|theory)", path.read_text()), path


def test_everything_public_exists() -> None:
    for name in cdgrab.__all__:
        assert hasattr(cdgrab, name)


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()

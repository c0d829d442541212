"""What small runs leave has not changed: with compiled loops and without, in one process.

Where a definition changes, `python -m goldens all > goldens/goldens.json` (in `tests`) writes it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from goldens._cases import ALONE
from goldens._compare import assert_golden

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=["numba", "plain"])
def found(request: pytest.FixtureRequest) -> Any:
    """Engines are chosen once in a process, so each has its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "goldens", request.param]
    output = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(output)


@pytest.mark.parametrize("name", ALONE)
def test_golden(found: Any, name: str) -> None:
    assert_golden(f"alone: {name}", found[name])

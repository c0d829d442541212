from __future__ import annotations

import pytest

from cdgrab.accel import numba_balancing as compiled


@pytest.fixture(params=["plain", "compiled"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of deciding signs on a CPU."""
    if request.param == "plain":
        monkeypatch.setattr(compiled, "available", lambda: False)
    elif not compiled.available():
        pytest.skip("numba is not installed")
    return str(request.param)

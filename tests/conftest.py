from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read once, by the first test on a GPU

# The machine may be shared and slow; a limit per example would only make tests flicker.
settings.register_profile("cdgrab", deadline=None, derandomize=True)
settings.load_profile("cdgrab")

# Two threads that wait for each other on a busy machine are far slower than one.
torch.set_num_threads(1)


# Tests in these folders share ranks, a browser, a build, or what was printed: one process runs all of a folder.
TOGETHER = {"browser", "distributed", "goldens", "package"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Side by side (`-n`), whole folders come first, then tests one by one.

    The marker `xdist_group` would do, but has no effect with pytest 9.2 and xdist 3.8:
    https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    def scope(nodeid: str) -> str:
        folders = TOGETHER & {*Path(nodeid.split("::")[0]).parts}
        return folders.pop() if folders else nodeid

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first, so that side by side none of them is left for the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)

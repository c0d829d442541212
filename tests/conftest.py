from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read once, by the first test on a GPU

# The machine may be shared and slow; a limit per example would only make tests flicker.
settings.register_profile("cdgrab", deadline=None, derandomize=True)
settings.load_profile("cdgrab")

# Two threads that wait for each other on a busy machine are far slower than one.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (`-n`), tests that start ranks or a browser take turns: each of them is a crowd by itself."""
    for item in items:
        if {"distributed", "browser", "docs"} & set(item.path.parts):
            item.add_marker(pytest.mark.xdist_group("crowds"))

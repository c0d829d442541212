"""Results on disk: one JSON line per run and epoch, with everything needed to repeat it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cdgrab
from cdgrab.paper.train import EpochRecord, RunConfig

Runs = dict[RunConfig, list[EpochRecord]]


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "cdgrab": cdgrab.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def save(runs: Runs, path: Path) -> None:
    """Write all runs, to a temporary name first, so that a file is whole or absent."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(json.dumps({"environment": environment()}) + "\n")
        for config, records in runs.items():
            for record in records:
                file.write(json.dumps({**asdict(config), **record.as_dict()}) + "\n")
    partial.replace(path)

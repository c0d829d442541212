"""The state of a run under way in a file: written whole, and read only if every byte is as it was written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from cdgrab_experiments.whole_files import write_whole

_KEYS = {"trained": int, "where": str, "model": dict, "optimizer": dict, "scheduler": dict}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, or leave what was there."""
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(path, content.getvalue())


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote; raises `ValueError` if the file was damaged or is another one."""
    try:
        # PyTorch reads tensors without comparing the checksums that it wrote beside them.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of its part {damaged} does not fit")
        state = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or "ordering" not in state:
            raise ValueError("it is no state of a run")
        for key, kind in _KEYS.items():
            if not isinstance(state.get(key), kind):
                raise ValueError(f"its part {key!r} is no {kind.__name__}")
    except Exception as error:  # a damaged file makes the readers of archives and pickles raise nearly anything
        raise ValueError(f"{path} cannot be read ({error})") from error
    return state

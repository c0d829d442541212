"""Files that are whole or absent, and folders that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from cdgrab_experiments.whole_files import alone, write_whole


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may write the same file meanwhile; either content is whole."""
    real = os.fsync

    def other(number: int) -> None:
        real(number)
        monkeypatch.setattr(os, "fsync", real)
        monkeypatch.setattr(os, "getpid", lambda: 12345)
        write_whole(tmp_path / "page", "b" * 10)

    monkeypatch.setattr(os, "fsync", other)
    write_whole(tmp_path / "page", "a" * 20)
    assert (tmp_path / "page").read_text() == "a" * 20
    assert os.listdir(tmp_path) == ["page"]


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"page.{os.getpid()}.partial").symlink_to(victim)
    write_whole(folder / "page", "new")
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"), alone(folder):
        pass
    assert victim.read_text() == "precious"
    assert (folder / "page").read_text() == "new"


def test_a_lock_that_was_given_up_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def late(file: Any, how: int) -> None:
        real(file, how)
        (tmp_path / ".lock").unlink()  # as its holder did between our two calls

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="another process is working"), alone(tmp_path):
        pass

"""Files that are whole or absent, whatever happens meanwhile: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, which is whole or absent whatever happens.

    Raises:
        ValueError: If it cannot be written; says which file, and leaves what was there.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # others may write the same file
    try:
        with create(partial) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; what was there is unchanged. Make room there or choose "
            "another folder, and try again"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def create(path: Path) -> IO[bytes]:
    """A new file at `path`, in the place of whatever was there; a link is replaced and never followed."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")


def sweep(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder that nobody else writes to."""
    for partial in folder.glob("*.partial"):
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else writes to the folder of a run meanwhile, which is made if it is not there."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        folder.mkdir(parents=True, exist_ok=True)
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    busy = f"another process is working on the run in {folder}; wait for it, or stop it"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(busy) from error
        # Whoever held the lock may have removed the file between our two calls, and a third process made a new one.
        if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.lstat()):
            raise ValueError(busy)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

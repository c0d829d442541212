"""Where data are looked for, what is there, and reading them with their hashes checked.

Data folder: `--data`, then the environment variable CDGRAB_DATA, then `~/.cache/cdgrab`. Files lie there as the public
distributes them (`catalogue.py`). A file whose hash is known must have it; who means to use other files (a part of a
set, say) lists them in a file SHA256SUMS beside them, as `sha256sum FILES > SHA256SUMS` writes it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdgrab_experiments.archives import bounded
from cdgrab_experiments.catalogue import CATALOGUE, DataError, DataSet, File, find_set

__all__ = ["CATALOGUE", "DataError", "Entry", "Found", "find", "find_first", "find_set", "folder", "inventory"]

_PACKED: dict[bytes, Callable[[io.BytesIO], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open}


def folder(chosen: Path | None) -> Path:
    """The data folder: as chosen on the command line, or by the environment, or the usual one."""
    if chosen is not None:
        return chosen.expanduser()
    named = os.environ.get("CDGRAB_DATA")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "cdgrab"


@dataclass(frozen=True)
class Found:
    """A data set that is there.

    Attributes:
        paths: Where each of its files is.
    """

    set: DataSet
    paths: dict[str, Path]

    def read(self, name: str) -> bytes:
        """The content of a file, unpacked; raises `DataError` if it is damaged."""
        raw = self.paths[name].read_bytes()
        unpack = next((unpack for magic, unpack in _PACKED.items() if raw.startswith(magic)), None)
        try:
            content = raw if unpack is None else b"".join(bounded(unpack(io.BytesIO(raw)), self.set.limit))
        except (DataError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise self.damaged(name, f"cannot be unpacked ({error})") from error
        expected = self._expected(name)
        if expected and (self.set.exact or self.listed) and not {_digest(raw), _digest(content)} & set(expected):
            listed = "listed in SHA256SUMS beside it" if self.listed else "distributed"
            raise self.damaged(name, f"is not the file that is {listed}")
        return content

    def text(self, name: str) -> str:
        """The same as text in UTF-8, without the byte-order mark if there is one."""
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.damaged(name, f"is not text in UTF-8 ({error.reason} at byte {error.start})") from error

    @property
    def listed(self) -> bool:
        """Whether a SHA256SUMS beside the files says what they should be."""
        return any((path.parent / "SHA256SUMS").exists() for path in self.paths.values())

    @property
    def note(self) -> str:
        """For lines on the data: whether a set with known hashes has other files in its place."""
        known = [file.name for file in self.set.files if file.sha256]
        own = self.listed and not all(self.original(name) for name in known)
        return "; not the files that are distributed, but those listed in SHA256SUMS" if own else ""

    def original(self, name: str) -> bool:
        """Whether a file with a known hash is the one that is distributed."""
        known = next(file.sha256 for file in self.set.files if file.name == name)
        return _digest(self.paths[name].read_bytes()) in known

    def damaged(self, name: str, why: str) -> DataError:
        """An error that names the file, the hash it has and the one it should have."""
        path = self.paths[name]
        expected = self._expected(name)
        wanted = f", expected {' or '.join(expected)}" if expected else "; the right one is not known"
        return DataError(
            f"{path} {why}: SHA-256 {_digest(path.read_bytes())}{wanted}. Remove it and get it again "
            f"({_how(self.set)}); if it is meant to differ, list it in {path.parent / 'SHA256SUMS'}"
        )

    def _expected(self, name: str) -> tuple[str, ...]:
        """Hashes that will do: those of SHA256SUMS, if it is there, else those of the catalogue."""
        path = self.paths[name]
        sums = path.parent / "SHA256SUMS"
        if sums.exists():
            lines = [line.split(maxsplit=1) for line in sums.read_text().splitlines()]
            return tuple(line[0] for line in lines if len(line) == 2 and line[1].lstrip("*") == path.name)
        return next(file.sha256 for file in self.set.files if file.name == name)


@dataclass(frozen=True)
class Entry:
    """A line of `cdgrab data`.

    Attributes:
        state: `"present"`, `"incomplete"` or `"missing"`.
        where: The folder it is in, or would be put into.
        missing: Names of files that are not there.
        how: How to get it.
        size: Bytes on disk; about, if it is not there.
    """

    name: str
    title: str
    state: str
    where: Path
    missing: tuple[str, ...]
    how: str
    size: int


def inventory(folder: Path) -> list[Entry]:
    """What is in the data folder, without reading any of it."""
    entries = []
    for known in CATALOGUE.values():
        where, paths = _look(known, folder)
        missing = tuple(file.name for file in known.files if file.name not in paths)
        state = "present" if not missing else "incomplete" if paths else "missing"
        size = sum(path.stat().st_size for path in paths.values()) if state == "present" else known.size
        entries.append(Entry(known.name, known.title, state, where, missing, _how(known), size))
    return entries


def find(name: str, folder: Path) -> Found:
    """The data set `name`, with all its files."""
    return find_first((name,), folder)


def find_first(names: Sequence[str], folder: Path) -> Found:
    """The first of several data sets that is there; raises `DataError` with what to do if none is."""
    for name in names:
        known = find_set(name)
        _, paths = _look(known, folder)
        if len(paths) == len(known.files):
            return Found(known, paths)
    lines = []
    for name in names:
        known = find_set(name)
        where, paths = _look(known, folder)
        missing = ", ".join(file.name for file in known.files if file.name not in paths)
        lines.append(f"{name}: {missing} not in {where}; {_how(known)}")
    raise DataError(
        f"the data set {' or '.join(repr(name) for name in names)} is not in the data folder {folder} (chosen by "
        f"--data, or else by the environment variable CDGRAB_DATA, or else ~/.cache/cdgrab). {'. '.join(lines)}"
    )


def _look(known: DataSet, folder: Path) -> tuple[Path, dict[str, Path]]:
    """The place where most of a set's files are, and which they are."""
    places = [folder / place for place in known.folders]
    if known.package is not None:
        spec = importlib.util.find_spec(known.package)
        places += [Path(place) / "model" for place in (spec.submodule_search_locations or [])] if spec else []
    candidates = []
    for place in places:
        paths = {file.name: path for file in known.files if (path := _path(file, place)) is not None}
        candidates.append((place, paths))
    return max(candidates, key=lambda candidate: len(candidate[1]))  # the first of equals


def _path(file: File, place: Path) -> Path | None:
    for name in (file.name, *file.also):
        for suffix in ("", ".gz", ".xz"):
            if (path := place / f"{name}{suffix}").is_file():
                return path
    return None


def _how(known: DataSet) -> str:
    by_command = f"run cdgrab data --download {known.name}, or " if known.sources else ""
    return f"{by_command}{known.by_hand}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

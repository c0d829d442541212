"""Fetching a data set from its public source: resumed where it broke off, checked, and whole or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from cdgrab_experiments.archives import unpack
from cdgrab_experiments.catalogue import DataError, DataSet, Source, find_set
from cdgrab_experiments.whole_files import create

# The file's name, bytes that have arrived, and all of them if that is known.
Progress = Callable[[str, int, int | None], None]

_CHUNK = 1 << 20
_SECONDS = 30


def download(name: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch the data set `name` into the data folder; returns where its files are.

    What has arrived before an interruption is kept, and the next call goes on from there.
    """
    known = find_set(name)
    if not known.sources:
        raise DataError(f"{name} has no public address that can be fetched; {known.by_hand}")
    place = folder / known.folders[0]
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {place} ({error.strerror}); choose another with --data") from error
    for source in known.sources:
        fetched = _fetch(known, source, place, progress or (lambda *_: None))
        if source.is_archive:
            try:
                unpack(known, fetched, place)
            finally:
                fetched.unlink()
    absent = [
        file.name for file in known.files if not any((place / f"{file.name}{end}").exists() for end in ("", ".gz"))
    ]
    if absent:
        raise DataError(
            f"what was fetched for {name} has no {', '.join(absent)} in it; get it by hand: {known.by_hand}"
        )
    return place


def _fetch(known: DataSet, source: Source, place: Path, progress: Progress) -> Path:
    """Fetch one file, under another name until it is whole and has the right hash."""
    target = place / source.file_name
    own = next((file.sha256 for file in known.files if source.file_name.removesuffix(".gz") == file.name), ())
    expected = own if source.sha256 is None else (source.sha256,)
    if target.exists() and (not expected or _digest(target) in expected):
        return target
    partial = target.with_name(f"{target.name}.partial")
    if not expected:
        # Without a hash nobody would notice if the two halves were of different files.
        partial.unlink(missing_ok=True)
    with _explained(known, source, partial):
        _continue(source.url, partial, known.limit, progress)
    found = _digest(partial)
    if expected and found not in expected:
        partial.unlink()
        raise DataError(
            f"{source.url} has the SHA-256 {found}, expected {' or '.join(expected)}; it was thrown away. Try again, "
            f"or get it by hand: {known.by_hand}"
        )
    partial.replace(target)
    return target


def _continue(url: str, partial: Path, limit: int, progress: Progress) -> None:
    """Fetch what is still missing of a file, which must not have more than `limit` bytes."""
    done = _kept(partial)
    headers = {"User-Agent": "cdgrab"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        answer = urlopen(Request(url, headers=headers), timeout=_SECONDS)
    except HTTPError as error:
        if error.code == 416:  # there is nothing after what we have; the hash will tell whether it is the right thing
            return
        raise
    with answer:
        goes_on = answer.status == 206
        done = done if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        _check_size(url, total or 0, limit)
        with _appended(partial) if goes_on else create(partial) as file:
            while chunk := answer.read(_CHUNK):
                done += len(chunk)
                _check_size(url, done, limit)
                file.write(chunk)
                progress(partial.name.removesuffix(".partial"), done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _kept(partial: Path) -> int:
    """Bytes that have arrived earlier; whatever else is there under that name, such as a link, is removed."""
    try:
        found = partial.lstat()
    except FileNotFoundError:
        return 0
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return found.st_size
    partial.unlink()
    return 0


def _appended(partial: Path) -> IO[bytes]:
    return os.fdopen(os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def _check_size(url: str, size: int, limit: int) -> None:
    if size > limit:
        raise DataError(f"{url} has {size:,} bytes or more, where at most {limit:,} can be right; it is not fetched")


@contextmanager
def _explained(known: DataSet, source: Source, partial: Path) -> Iterator[None]:
    """Errors of the network and of the disk, with what to do."""
    try:
        yield
    except HTTPError as error:
        raise DataError(
            f"{source.url} answers {error.code} ({error.reason}); get {known.name} by hand: {known.by_hand}"
        ) from error
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise DataError(
                f"cannot write {partial} ({error}); {known.name} takes {known.size:,} bytes; make room, or choose "
                "another folder with --data"
            ) from error
        kept = (
            f" {partial.stat().st_size:,} bytes are kept, and the next try goes on there." if partial.exists() else ""
        )
        raise DataError(
            f"{source.url} could not be fetched ({getattr(error, 'reason', error)}).{kept} Without a network, get "
            f"{known.name} by hand: {known.by_hand}"
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

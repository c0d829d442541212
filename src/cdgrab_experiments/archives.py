"""Taking a set's files out of an archive that may be damaged or hostile: by name, up to a size, and checked."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from cdgrab_experiments.catalogue import DataError, DataSet, File
from cdgrab_experiments.whole_files import create

_CHUNK = 1 << 20
_ENCRYPTED = 1  # in the flags of a file in a zip
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError)


def unpack(known: DataSet, archive: Path, place: Path) -> None:
    """Take the set's own files out of an archive, by their names alone: no path in it decides where anything goes."""
    try:
        with _opened(archive, known.limit) as (members, read):
            for file in known.files:
                same = [member for member in members if PurePosixPath(member).name in (file.name, *file.also)]
                if same:
                    with read(min(same, key=lambda path: path.count("/"))) as packed:
                        _take(known, file, place, packed)
    except DataError as error:
        raise DataError(f"{archive} was thrown away: {error}; get {known.name} by hand: {known.by_hand}") from error
    except _DAMAGED as error:
        raise DataError(f"{archive} cannot be unpacked ({error}) and was thrown away; try again") from error


def bounded(unpacked: IO[bytes], limit: int) -> Iterator[bytes]:
    """What `unpacked` holds, in chunks; raises `DataError` as soon as it is more than `limit` bytes."""
    done = 0
    while chunk := unpacked.read(_CHUNK):
        done += len(chunk)
        if done > limit:
            raise DataError(f"it unpacks to more than {limit:,} bytes, more than can be right")
        yield chunk


def _take(known: DataSet, file: File, place: Path, packed: IO[bytes]) -> None:
    partial, digest = place / f"{file.name}.partial", hashlib.sha256()
    try:
        with create(partial) as unpacked:
            for chunk in bounded(packed, known.limit):
                digest.update(chunk)
                unpacked.write(chunk)
        if known.exact and file.sha256 and digest.hexdigest() not in file.sha256:
            raise DataError(
                f"{file.name} in it has the SHA-256 {digest.hexdigest()}, expected {' or '.join(file.sha256)}"
            )
        partial.replace(place / file.name)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _opened(archive: Path, limit: int) -> Iterator[tuple[list[str], Callable[[str], IO[bytes]]]]:
    """Names of the plain files in an archive, and a function that opens one."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:

            def read_zipped(name: str) -> IO[bytes]:
                if packed.getinfo(name).flag_bits & _ENCRYPTED:
                    raise DataError(f"{name} in it is encrypted, and there is no password for it")
                return packed.open(name)

            yield [info.filename for info in packed.infolist() if not info.is_dir()], read_zipped
        return
    with _BoundedGzip(archive, limit) as raw, tarfile.open(fileobj=raw) as tar:

        def read(name: str) -> IO[bytes]:
            opened: Any = tar.extractfile(name)
            assert opened is not None  # only plain files are named
            return opened  # type: ignore[no-any-return]

        yield [member.name for member in tar.getmembers() if member.isfile()], read


class _BoundedGzip(gzip.GzipFile):
    """Whatever looks for something in the archive gets no further than `limit` bytes of it."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path, "rb")
        self._limit = limit

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(self._limit + 1 if size is None or size < 0 else size)
        self._check(self.tell())
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0:
            self._check(offset)
        return super().seek(offset, whence)

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise DataError(f"the archive unpacks to more than {self._limit:,} bytes, more than can be right")

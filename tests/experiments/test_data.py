from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import _data
from cdgrab_experiments import data
from cdgrab_experiments.catalogue import CATALOGUE, DataError, DataSet, File, Source, find_set
from cdgrab_experiments.download import download

CONTENT = bytes(range(256)) * 5000  # more than a chunk


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Server:
    """Files over HTTP, with the faults of the real world."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut_after: int | None = None  # bytes, after which the connection ends
        self.knows_ranges = True
        self.ranges: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                outer.ranges.append(wanted)
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and outer.knows_ranges else 0
                if start and start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                self.wfile.write(content[start:][: outer.cut_after])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()
    thread.join()


@pytest.fixture
def tiny(server: Server, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """A data set of one file on the server."""
    server.files["/tiny.bin"] = CONTENT
    made = DataSet(
        "tiny",
        "Tiny",
        ("tiny",),
        (File("tiny.bin", (), (digest(CONTENT),)),),
        len(CONTENT),
        "ask a friend",
        (Source(f"{server.url}/tiny.bin"),),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", made)
    return made


def test_the_folder_is_chosen_by_argument_environment_or_habit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDGRAB_DATA", "/somewhere")
    assert data.folder(Path("/chosen")) == Path("/chosen")
    assert data.folder(None) == Path("/somewhere")
    monkeypatch.delenv("CDGRAB_DATA")
    assert data.folder(None) == Path.home() / ".cache" / "cdgrab"


def test_the_inventory_tells_present_incomplete_and_missing(tmp_path: Path) -> None:
    _data.m4(tmp_path)
    _data.a9a(tmp_path)
    (tmp_path / "a9a" / "a9a.t").unlink()
    found = {entry.name: entry for entry in data.inventory(tmp_path)}
    assert found.keys() == CATALOGUE.keys()
    assert (found["m4-weekly"].state, found["m4-weekly"].missing) == ("present", ())
    assert found["m4-weekly"].size == sum(
        (tmp_path / "m4" / f"Weekly-{s}.csv").stat().st_size for s in ("train", "test")
    )
    assert (found["a9a"].state, found["a9a"].missing) == ("incomplete", ("a9a.t",))
    assert (found["cifar-10"].state, found["cifar-10"].where) == ("missing", tmp_path / "cifar-10-batches-bin")
    assert "cdgrab data --download cifar-10" in found["cifar-10"].how
    assert found["glue-mrpc"].how.startswith("run GLUE's download_glue_data.py")


def test_a_missing_set_says_where_it_was_looked_for_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="m4-weekly") as caught:
        data.find("m4-weekly", tmp_path)
    for part in (
        str(tmp_path),
        "--data",
        "CDGRAB_DATA",
        "~/.cache/cdgrab",
        "cdgrab data --download m4-weekly",
        "https://",
    ):
        assert part in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_unknown_sets_are_answered_with_the_nearest() -> None:
    with pytest.raises(DataError, match="no data set 'cifar10'; did you mean 'cifar-10'"):
        find_set("cifar10")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_files_may_be_packed_and_are_checked_all_the_same(suffix: str, pack: object, tmp_path: Path) -> None:
    assert callable(pack)
    place = tmp_path / "tiny"
    place.mkdir()
    path = place / f"tiny.bin{suffix}"
    path.write_bytes(pack(CONTENT))
    assert data.find("tiny", tmp_path).read("tiny.bin") == CONTENT

    path.write_bytes(pack(CONTENT[:-1] + b"?"))
    with pytest.raises(DataError, match="is not the file that is distributed") as caught:
        data.find("tiny", tmp_path).read("tiny.bin")
    assert str(path) in str(caught.value)
    assert digest(path.read_bytes()) in str(caught.value)
    assert digest(CONTENT) in str(caught.value)

    _data.list_files(place)
    assert data.find("tiny", tmp_path).read("tiny.bin").endswith(b"?")


def test_text_knows_byte_order_marks_and_refuses_bytes(tmp_path: Path) -> None:
    _data.a9a(tmp_path)
    (tmp_path / "a9a" / "a9a").write_bytes(b"\xef\xbb\xbf+1 3:1\n")
    found = data.find("a9a", tmp_path)
    assert found.text("a9a") == "+1 3:1\n"
    (tmp_path / "a9a" / "a9a").write_bytes(b"+1 3:1\n\xff\n")
    with pytest.raises(DataError, match=r"not text in UTF-8 .* at byte 7"):
        found.text("a9a")


@pytest.mark.usefixtures("tiny")
def test_a_download_is_checked_and_reported(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    place = download("tiny", tmp_path, lambda *step: seen.append(step))
    assert (place / "tiny.bin").read_bytes() == CONTENT
    assert seen[-1] == ("tiny.bin", len(CONTENT), len(CONTENT))
    assert os.listdir(place) == ["tiny.bin"]
    assert data.find("tiny", tmp_path).read("tiny.bin") == CONTENT


@pytest.mark.usefixtures("tiny")
def test_a_download_goes_on_where_it_broke_off(tmp_path: Path, server: Server) -> None:
    server.cut_after = 700_001
    with pytest.raises(DataError, match=r"700,001 bytes are kept.* ask a friend"):
        download("tiny", tmp_path)
    assert not (tmp_path / "tiny" / "tiny.bin").exists()
    server.cut_after = None
    place = download("tiny", tmp_path)
    assert (place / "tiny.bin").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=700001-"]
    download("tiny", tmp_path)
    assert len(server.ranges) == 2, "what is there is not fetched again"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kept", [CONTENT[:1000], CONTENT])
def test_a_download_goes_on_whatever_the_server_knows(kept: bytes, tmp_path: Path, server: Server) -> None:
    server.knows_ranges = len(kept) == len(CONTENT)  # in the second case it says that nothing is left
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.bin.partial").write_bytes(kept)
    assert (download("tiny", tmp_path) / "tiny.bin").read_bytes() == CONTENT


def test_a_file_without_a_hash_begins_anew(
    tmp_path: Path, server: Server, tiny: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, files=(File("tiny.bin"),)))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.bin.partial").write_bytes(b"half of an older one")
    assert (download("tiny", tmp_path) / "tiny.bin").read_bytes() == CONTENT
    assert server.ranges == [None]


@pytest.mark.usefixtures("tiny")
def test_a_wrong_file_is_thrown_away(tmp_path: Path, server: Server) -> None:
    server.files["/tiny.bin"] = b"a page that says the file has moved"
    with pytest.raises(DataError, match="thrown away") as caught:
        download("tiny", tmp_path)
    assert digest(server.files["/tiny.bin"]) in str(caught.value)
    assert digest(CONTENT) in str(caught.value)
    assert os.listdir(tmp_path / "tiny") == []


def test_without_a_network_it_says_what_to_do(tmp_path: Path, tiny: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = (Source("http://127.0.0.1:9/tiny.bin"),)
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=nobody))
    with pytest.raises(DataError, match=r"http://127.0.0.1:9/tiny.bin could not be fetched .*by hand: ask a friend"):
        download("tiny", tmp_path)
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=()))
    with pytest.raises(DataError, match="no public address that can be fetched; ask a friend"):
        download("tiny", tmp_path)


@pytest.mark.usefixtures("tiny")
def test_other_failures_are_named(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot make the folder .* choose another with --data"):
        download("tiny", tmp_path / "file")
    del server.files["/tiny.bin"]
    with pytest.raises(DataError, match=r"tiny.bin answers 404 .*ask a friend"):
        download("tiny", tmp_path)


def packed(kind: str, names: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as zipped:
            for name, content in names.items():
                zipped.writestr(name, content)
    else:
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, content in names.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archives_give_the_files_of_the_set_and_nothing_else(
    kind: str, tmp_path: Path, server: Server, tiny: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"top/old/tiny.bin": b"old", "top/tiny.bin": CONTENT, "../../evil": b"!", "/etc/evil": b"!"}
    archive = packed(kind, names)
    server.files[f"/tiny.{kind}"] = archive
    sources = (Source(f"{server.url}/tiny.{kind}", digest(archive)),)
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=sources))
    place = download("tiny", tmp_path / "data")
    assert os.listdir(place) == ["tiny.bin"]
    assert (place / "tiny.bin").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "tiny", "tiny.bin"]

    server.files[f"/tiny.{kind}"] = packed(kind, {"other": b""})
    sources = (Source(f"{server.url}/tiny.{kind}"),)
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=sources))
    with pytest.raises(DataError, match=r"fetched for tiny has no tiny.bin in it"):
        download("tiny", tmp_path / "again")
    server.files[f"/tiny.{kind}"] = archive[: len(archive) // 2]
    with pytest.raises(DataError, match="cannot be unpacked"):
        download("tiny", tmp_path / "and again")


def test_the_catalogue_is_sound() -> None:
    for known in CATALOGUE.values():
        hashes = [h for file in known.files for h in file.sha256] + [s.sha256 for s in known.sources if s.sha256]
        assert all(len(h) == 64 and int(h, 16) >= 0 for h in hashes)
        assert all(source.url.startswith("https://") for source in known.sources)
        for source in known.sources:
            names = [file.name for file in known.files]
            assert source.is_archive or source.file_name.removesuffix(".gz") in names


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archives_that_unpack_to_too_much_are_thrown_away(
    kind: str, tmp_path: Path, server: Server, tiny: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes of zeros for a set of a megabyte."""
    for names in ({"tiny.bin": b"\0" * (tiny.limit + 1)}, {"other.bin": b"\0" * (2 * tiny.limit), "tiny.bin": CONTENT}):
        squeezed = io.BytesIO()
        if kind == "zip":
            with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as zipped:
                for name, content in names.items():
                    zipped.writestr(name, content)
        else:
            squeezed.write(packed(kind, names))
        server.files[f"/tiny.{kind}"] = squeezed.getvalue()
        monkeypatch.setitem(
            CATALOGUE, "tiny", dataclasses.replace(tiny, sources=(Source(f"{server.url}/tiny.{kind}"),))
        )
        if kind == "zip" and "other.bin" in names:  # which is never opened
            assert download("tiny", tmp_path).exists()
            continue
        with pytest.raises(DataError, match=r"thrown away: .* more than can be right; get tiny by hand"):
            download("tiny", tmp_path)
        assert os.listdir(tmp_path / "tiny") == []


def test_an_encrypted_zip_is_told_in_words(
    tmp_path: Path, server: Server, tiny: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(packed("zip", {"tiny.bin": CONTENT}))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags in both headers
        content[content.index(signature) + place] |= 1
    server.files["/tiny.zip"] = bytes(content)
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=(Source(f"{server.url}/tiny.zip"),)))
    with pytest.raises(
        DataError, match=r"tiny\.bin in it is encrypted, and there is no password for it; get tiny by hand"
    ):
        download("tiny", tmp_path)
    assert os.listdir(tmp_path / "tiny") == []


def test_another_file_in_an_archive_is_thrown_away(
    tmp_path: Path, server: Server, tiny: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/tiny.zip"] = packed("zip", {"tiny.bin": CONTENT[:-1] + b"?"})
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=(Source(f"{server.url}/tiny.zip"),)))
    with pytest.raises(DataError, match=f"expected {digest(CONTENT)}"):
        download("tiny", tmp_path)
    assert os.listdir(tmp_path / "tiny") == []


@pytest.mark.usefixtures("tiny")
def test_a_file_that_is_far_too_large_is_not_fetched(tmp_path: Path, server: Server, tiny: DataSet) -> None:
    server.files["/tiny.bin"] = b"x" * (tiny.limit + 1)
    with pytest.raises(DataError, match="it is not fetched"):
        download("tiny", tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "tiny").iterdir()) == 0


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("how", ["symlink", "hard link", "pipe"])
def test_what_lies_in_the_place_of_a_partial_file_is_never_written_to(how: str, tmp_path: Path) -> None:
    victim, partial = tmp_path / "victim", tmp_path / "tiny" / "tiny.bin.partial"
    victim.write_bytes(CONTENT[:10])
    partial.parent.mkdir()
    if how == "symlink":
        partial.symlink_to(victim)
    elif how == "hard link":
        partial.hardlink_to(victim)
    else:
        os.mkfifo(partial)
    assert (download("tiny", tmp_path) / "tiny.bin").read_bytes() == CONTENT
    assert victim.read_bytes() == CONTENT[:10]


def test_a_link_in_the_place_of_an_unpacked_file_is_not_followed(
    tmp_path: Path, server: Server, tiny: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.bin.partial").symlink_to(victim)
    server.files["/tiny.zip"] = packed("zip", {"tiny.bin": CONTENT})
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(tiny, sources=(Source(f"{server.url}/tiny.zip"),)))
    assert (download("tiny", tmp_path) / "tiny.bin").read_bytes() == CONTENT
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_packed_file_that_unpacks_to_too_much_is_named(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path, tiny: DataSet
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / f"tiny.bin{suffix}").write_bytes(pack(bytes(tiny.limit + 1)))
    with pytest.raises(DataError, match=r"cannot be unpacked \(it unpacks to more than"):
        data.find("tiny", tmp_path).read("tiny.bin")


def test_every_archive_with_a_fixed_version_has_a_hash() -> None:
    without = {known.name for known in CATALOGUE.values() for s in known.sources if s.is_archive and s.sha256 is None}
    assert without == set()

"""Objects under a URL: compared when written, asked for again when cut short, given up in the end.

The store in memory fails as it is told to; that of S3 is a server on this machine, whose ETags are
an oracle of their own: they are computed from the bytes that arrived.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.checkpoint import stores
from tests.naming import naming
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint import objects
from torchtitan.checkpoint.checksums import FileRecord
from torchtitan.checkpoint.objects import ObjectStore, part_size, shown

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def faulty() -> Iterator[type[stores.FaultyStore]]:
    with stores.faulty_store() as store:
        yield store


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of small files, and short pauses."""
    monkeypatch.setattr(objects, "PART", 10_000)
    monkeypatch.setattr(objects, "LONGEST_PAUSE", 0.001)


def open_store(url: str = "faulty://bucket/run", **how: Any) -> ObjectStore:
    settings = {"key": "checkpoint.folder", "patience_seconds": 5, **how}
    return ObjectStore(url, **settings)


def write_file(folder: Path, content: bytes = CONTENT) -> tuple[Path, FileRecord]:
    path = folder / "file"
    path.write_bytes(content)
    return path, FileRecord(len(content), xxhash.xxh3_128(content).hexdigest())


def test_what_is_put_is_fetched_and_not_sent_twice(faulty: Any, tmp_path: Path) -> None:
    file, record = write_file(tmp_path)
    store = open_store()
    assert store.put(file, "a/b", record=record)
    assert not store.put(file, "a/b", record=record)
    assert store.fetch("a/b", tmp_path / "copy", record=record) is None
    assert (tmp_path / "copy").read_bytes() == CONTENT


@pytest.mark.parametrize("request_kind", ["read", "write", "look", "list", "remove"])
def test_a_request_that_fails_twice_is_repeated(
    request_kind: str, faulty: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError("503 Slow Down"), ConnectionError("reset")]

    def fail_twice(request: str, path: str) -> None:
        if request == request_kind and failures:
            raise failures.pop()

    faulty.before = staticmethod(fail_twice)
    file, record = write_file(tmp_path)
    store = open_store()
    with caplog.at_level(logging.WARNING):
        store.put(file, "a/b", record=record)
        assert store.fetch("a/b", tmp_path / "copy", record=record) is None
        assert store.list_names() == ["a"]
        store.remove(["a/b"])
    assert not failures
    assert store.size("a/b") is None
    assert caplog.text.count("trying again") == 2


@pytest.mark.promise("hangs")
def test_patience_ends(faulty: Any) -> None:
    def fail(request: str, path: str) -> None:
        raise OSError("503 Slow Down")

    faulty.before = staticmethod(fail)
    with pytest.raises(CheckpointError, match=naming("faulty://bucket/run", "x", "503 Slow Down")):
        open_store(patience_seconds=0.05).read("x")


def test_what_no_repetition_mends_ends_at_once(
    faulty: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: str, path: str) -> None:
        raise PermissionError("Access Denied")

    faulty.before = staticmethod(fail)
    with pytest.raises(CheckpointError, match="Access Denied"):
        open_store(patience_seconds=1e9).write("x", b"")
    assert not caplog.records


def test_an_answer_that_is_cut_short_is_asked_for_again(faulty: Any, tmp_path: Path) -> None:
    file, record = write_file(tmp_path)
    store = open_store()
    store.put(file, "a", record=record)
    cut = iter([True, False, True])
    faulty.answer = staticmethod(lambda path, got: got[:-1] if next(cut, False) else got)
    assert store.fetch("a", tmp_path / "copy", record=record) is None
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert next(cut, None) is None


@pytest.mark.promise("flipped-byte")
def test_bytes_that_arrive_changed_are_noticed(faulty: Any, tmp_path: Path) -> None:
    file, record = write_file(tmp_path)
    store = open_store()
    store.put(file, "a", record=record)
    faulty.answer = staticmethod(lambda path, got: b"x" + got[1:])
    assert store.fetch("a", tmp_path / "copy", record=record) == (
        "a is damaged: its checksum differs"
    )
    with pytest.raises(CheckpointError, match=naming("faulty://bucket/run/b", 3)):
        store.put(file, "b", record=record)


def test_a_damaged_file_is_not_uploaded(faulty: Any, tmp_path: Path) -> None:
    file, record = write_file(tmp_path)
    file.write_bytes(b"x" + CONTENT[1:])
    with pytest.raises(CheckpointError, match=naming(file)):
        open_store().put(file, "a", record=record)
    assert not faulty.store


def test_missing_objects_and_other_sizes(faulty: Any, tmp_path: Path) -> None:
    store, copy = open_store(), tmp_path / "copy"
    assert store.read("a") is None
    assert store.list_names() == []
    assert store.fetch("a", copy, record=FileRecord(3, "")) == "a is missing"
    store.write("a", b"1234")
    assert store.fetch("a", copy, record=FileRecord(3, "")) == "a has 4 bytes, not 3"


@pytest.mark.parametrize(
    "text",
    [
        f"SignatureDoesNotMatch: {stores.SECRET}",
        "GET https://b.s3/x?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE/s3&X-Amz-Signature=0123abc",
        "the key AKIAIOSFODNN7EXAMPLE does not exist",
        "header Authorization: AWS4-HMAC-SHA256",
        "a session with hunter2hunter2",
    ],
)
def test_credentials_are_not_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_STORE_PASSWORD", "hunter2hunter2")
    said = shown(OSError(text))
    assert "***" in said
    for part in (stores.SECRET, "AKIA", "0123abc", "HMAC", "hunter2"):
        assert part not in said


def test_a_missing_package_and_an_unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def refuse(*args: Any, **how: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(
        ConfigError, match=naming("[checkpoint] folder", "s3://", "'nowhere://bucket/run'")
    ):
        open_store("nowhere://bucket/run")
    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match=naming("[checkpoint] folder", "s3://", ".[s3]")):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("size", [0, 1 << 20, 100 << 30, 5 << 40])
def test_no_object_has_too_many_parts(size: int) -> None:
    assert size / part_size(size) <= 10_000


@pytest.mark.slow
def test_a_server_of_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART", 5 << 20)  # S3's least
    content = CONTENT * 120  # three parts
    file, record = write_file(tmp_path, content)
    with stores.s3_server("bucket"):
        store = open_store("s3://bucket/run")
        reads = []
        read, monkeypatched = store._part, pytest.MonkeyPatch()
        monkeypatched.setattr(store, "_part", lambda *which: reads.append(which) or read(*which))
        assert store.put(file, "step-1/large", record=record)
        small, of_small = write_file(tmp_path, b"small")
        assert store.put(small, "step-1/small", record=of_small)
        assert not reads  # the ETags were as good
        parts = [content[at : at + (5 << 20)] for at in range(0, len(content), 5 << 20)]
        etag = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
        info = store._info("step-1/large")
        assert info is not None
        assert info["ETag"] == f'"{etag}-{len(parts)}"'
        assert store.fetch("step-1/large", tmp_path / "copy", record=record) is None
        assert (tmp_path / "copy").read_bytes() == content
        store.write("step-1/text", b"whole")
        assert store.read("step-1/text") == b"whole"
        assert store.read("step-1/not there") is None
        store.remove(["step-1/text"])
        assert store.list_names() == ["step-1"]
        assert sorted(store.list_sizes("step-1")) == ["step-1/large", "step-1/small"]
        store.remove(["step-1/large", "step-1/small", "step-1/not there"])
        assert store.list_names() == []
        with pytest.raises(CheckpointError, match=naming("s3://no-such-bucket/run", "x")):
            open_store("s3://no-such-bucket/run").write("x", b"")

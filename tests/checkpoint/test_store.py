"""Objects below a URL: requests are repeated, given up in the end, and what arrives is compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.checkpoint import stores
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.base.urls import without_secrets
from torchtitan.checkpoint import remote
from torchtitan.checkpoint.checksums import FileRecord
from torchtitan.checkpoint.remote import Store

CONTENT = bytes(range(256)) * 400
RECORD = FileRecord(len(CONTENT), xxhash.xxh3_128(CONTENT).hexdigest())


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[stores.FaultyStore]]:
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.001)
    with stores.faulty_store() as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def open_store(url: str = "faulty://bucket/run", timeout_seconds: float = 5) -> Store:
    return Store(url, key="checkpoint.folder", timeout_seconds=timeout_seconds)


@pytest.mark.parametrize("request_kind", ["read", "write", "list", "remove"])
def test_a_request_that_fails_twice_is_repeated(
    request_kind: str, faulty: Any, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError("503 Slow Down"), ConnectionError("reset")]

    def fail_twice(request: str, path: str) -> None:
        if request == request_kind and failures:
            raise failures.pop()

    faulty.before = staticmethod(fail_twice)
    store = open_store()
    with caplog.at_level(logging.WARNING):
        store.put(file, "a/b")
        assert store.get("a/b", file.with_name("copy"), record=RECORD) is None
        assert store.list() == {"a/b": len(CONTENT)}
        store.remove(["a/b"])
    assert file.with_name("copy").read_bytes() == CONTENT
    assert not failures
    assert store.list() == {}
    assert caplog.text.count("trying again") == 2


@pytest.mark.promise("hangs")
def test_repeating_ends(faulty: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: str, path: str) -> None:
        raise PermissionError("Access Denied") if request == "write" else OSError("503 Slow Down")

    faulty.before = staticmethod(fail)
    with pytest.raises(CheckpointError, match=naming("faulty://bucket/run", "x", "503 Slow Down")):
        open_store(timeout_seconds=0.05).read("x")
    caplog.clear()
    with pytest.raises(CheckpointError, match="Access Denied"):
        open_store(timeout_seconds=1e9).write("x", b"")
    assert not caplog.records


@pytest.mark.promise("flipped-byte")
def test_bytes_that_arrive_changed_are_noticed(faulty: Any, file: Path) -> None:
    store, copy = open_store(), file.with_name("copy")
    store.put(file, "a")
    cut = iter([True])
    faulty.answer = staticmethod(lambda path, got: got[:-1] if next(cut, False) else got)
    assert store.get("a", copy, record=RECORD) is None
    assert copy.read_bytes() == CONTENT
    faulty.answer = staticmethod(lambda path, got: b"x" + got[1:])
    assert "checksum" in (store.get("a", copy, record=RECORD) or "")
    assert store.read("b") is None
    assert store.get("b", file.with_name("none"), record=RECORD) is not None


@pytest.mark.promise("object-stores")
@pytest.mark.parametrize(
    "text",
    [
        f"SignatureDoesNotMatch: {stores.SECRET}",
        "GET https://b.s3/x?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE/s3&X-Amz-Signature=0123abc",
        "header Authorization: AWS4-HMAC-SHA256",
        "a session with hunter2hunter2",
    ],
)
def test_credentials_are_not_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_STORE_PASSWORD", "hunter2hunter2")
    said = without_secrets(text)
    assert "***" in said
    for part in (stores.SECRET, "AKIA", "0123abc", "HMAC", "hunter2"):
        assert part not in said


@pytest.mark.slow
def test_a_server_of_s3(file: Path) -> None:
    with stores.s3_server("bucket"):
        store, copy = open_store("s3://bucket/run"), file.with_name("copy")
        store.put(file, "step-1/file")
        assert store.get("step-1/file", copy, record=RECORD) is None
        assert copy.read_bytes() == CONTENT
        store.write("step-1/text", b"whole")
        assert store.read("step-1/text") == b"whole"
        assert store.read("step-1/not there") is None
        assert store.list() == {"step-1/file": len(CONTENT), "step-1/text": 5}
        store.remove(["step-1/text", "step-1/file", "step-1/not there"])
        assert store.list() == {}
        with pytest.raises(CheckpointError, match=naming("s3://no-such-bucket/run", "x")):
            open_store("s3://no-such-bucket/run", timeout_seconds=0.1).write("x", b"")

"""Data of an object store: copied once, whole, and again when it changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import stores
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from torchtitan.base.errors import DataError
from torchtitan.data import files
from torchtitan.data.files import find_files

TEXTS = {"corpus/b.txt": "b", "corpus/a.txt": "a", "corpus/deep/c.txt": "c", "corpus/d.md": "d"}


@pytest.fixture
def faulty() -> Iterator[type[stores.FaultyStore]]:
    with stores.faulty_store() as store:
        for name, text in TEXTS.items():
            store().pipe_file(f"/bucket/{name}", text.encode())
        yield store


def find(cache: Path) -> Callable[[str], dict[str, str]]:
    """Return what finds copies: their contents by their path in the copy."""

    def named(url: str) -> dict[str, str]:
        files = find_files(url, cache=str(cache))
        return {"/".join(f.relative_to(cache).parts[2:]): f.read_text() for f in files}

    return named


@pytest.mark.parametrize("name", ["tokens", "tokens.idx", "tokens.bin", "tok*.bin", "*"])
def test_a_token_store_comes_whole(name: str, faulty: Any, tmp_path: Path) -> None:
    for half in (".idx", ".bin"):
        faulty().pipe_file(f"/bucket/stores/tokens{half}", half.encode())
    [index] = find_files(f"faulty://bucket/stores/{name}", cache=str(tmp_path))
    assert index.name == "tokens.idx"
    assert index.with_suffix(".bin").read_text() == ".bin"


def test_what_is_there_is_not_copied_again(faulty: Any, tmp_path: Path) -> None:
    read: list[str] = []
    faulty.before = staticmethod(lambda kind, path: read.append(path) if kind == "read" else None)
    url, named = "faulty://bucket/corpus/*.txt", find(tmp_path)
    for _ in range(2):
        named(url)
        assert sorted(read) == ["/bucket/corpus/a.txt", "/bucket/corpus/b.txt"]
    faulty().pipe_file("/bucket/corpus/b.txt", b"other")
    assert named(url) == {"a.txt": "a", "b.txt": "other"}


def test_a_copy_that_broke_off_goes_on(faulty: Any, tmp_path: Path) -> None:
    def fail_once(kind: str, path: str) -> None:
        if kind == "read" and path.endswith("b.txt"):
            raise OSError("the wire is cut")

    faulty.before = staticmethod(fail_once)
    url, named = "faulty://bucket/corpus/*.txt", find(tmp_path)
    with pytest.raises(DataError, match="the wire is cut"):
        named(url)
    read: list[str] = []
    faulty.before = staticmethod(lambda kind, path: read.append(path) if kind == "read" else None)
    assert named(url) == {"a.txt": "a", "b.txt": "b"}
    assert read == ["/bucket/corpus/b.txt"]


def test_a_store_that_does_not_answer_is_not_empty(faulty: Any, tmp_path: Path) -> None:
    def fail(kind: str, path: str) -> None:
        if kind == "look":
            raise OSError("the wire is cut")

    faulty.before = staticmethod(fail)
    with pytest.raises(DataError, match="the wire is cut"):
        find(tmp_path)("faulty://bucket/corpus/a.txt")


def test_no_copy_leaves_its_folder(faulty: Any, tmp_path: Path) -> None:
    entries = {"bucket/x/../../a.txt": {"size": 1}, "bucket/b.txt": {"size": 1}}
    with pytest.raises(ValueError, match=r"\.\."):
        files._copy(faulty(), entries, cache=tmp_path / "in", url="")


def test_no_secret_is_shown(faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", stores.SECRET)

    def fail(kind: str, path: str) -> None:
        raise OSError(f"denied to {stores.SECRET} at ?X-Amz-Signature=0123")

    faulty.before = staticmethod(fail)
    with pytest.raises(DataError) as error:
        find(tmp_path)("faulty://bucket/corpus/a.txt")
    assert stores.SECRET not in str(error.value)
    assert "0123" not in str(error.value)


@pytest.mark.promise("object-stores")
@pytest.mark.slow
def test_ranks_train_on_a_bucket_as_on_files(ranks: RankPool, tmp_path: Path) -> None:
    """The bucket is a folder; tests/checkpoint/test_objects.py has a server of S3."""
    text = "".join(f"line {number} of a text\n" for number in range(3000))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text(text)
    found = []
    for place in (f"{tmp_path}/data/text.txt", f"file://{tmp_path}/data/*.txt"):
        job = jobs.write_job(tmp_path, name=f"run{len(found)}")
        job += ["--training.dataset=files", f"--training.dataset_path={place}", UNSAVED]
        [result, _] = ranks.run(jobs.train, [*job, "--training.steps=2"], world=2)
        found.append([row["loss"] for row in result.rows])
    assert found[0] == found[1]
    copies = [path.name for path in (tmp_path / "cache" / "fetched").rglob("*.txt")]
    assert copies == ["text.txt"]

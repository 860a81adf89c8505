"""Which files are taken, and what is said of those that are not."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
import zstandard

from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.corpus import file_corpus
from torchtitan.data.files import find_all, find_files
from torchtitan.data.prepare import cached_store
from torchtitan.data.tokenizer import ByteTokenizer


def test_find_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b.txt", "a.txt", "c.md", "s.bin", "s.idx", "[x].txt", "deep/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()

    def names(pattern: str) -> list[str]:
        return [p.relative_to(tmp_path).as_posix() for p in find_files(str(tmp_path / pattern))]

    assert names("*.txt") == ["[x].txt", "a.txt", "b.txt"]
    assert "1 of 4 files" in caplog.text
    assert names("**/*.txt") == ["[x].txt", "a.txt", "b.txt", "deep/d.txt"]
    assert names("[x].txt") == ["[x].txt"]
    # a store is one thing, by any of its names
    for store in ("s", "s.bin", "s.idx", "s.*"):
        assert names(store) == ["s.idx"]
    wrong = ("*.no", "e*.txt", "dee*", "x" * 5000)
    for pattern in (*(str(tmp_path / name) for name in wrong), "~nobody-such/a.txt", "hf://a/b"):
        with pytest.raises(DataError, match=r"^dataset_path: "):
            find_files(pattern)


def test_a_copy_of_a_table_is_no_text(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.bak"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl\.bak"):
        find_files(str(tmp_path))
    assert find_files(str(tmp_path / "a.jsonl")) == [tmp_path / "a.jsonl"]


def test_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert find_files(str(tmp_path / "b.txt")) == [tmp_path / "b.txt"]
    (tmp_path / "c.txt").symlink_to("gone.txt")
    for pattern in ("c.txt", "*.txt"):
        with pytest.raises(DataError, match=r"c\.txt"):
            find_files(str(tmp_path / pattern))


@pytest.mark.parametrize("name", ["README", "part-00001", "a.py", "A.TXT", "a.c.gz", "Vol. 2 of"])
def test_text_of_any_name(tmp_path: Path, name: str) -> None:
    text = "PAR1 and BZh are words, é too\n"
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (file,) = find_files(str(tmp_path / name))
    assert [p.text for p in file_corpus((file,), "text").pieces()] == [text]


BINARIES = [
    b"PAR1\x15\x04\x15\x80\0",
    pickle.dumps({"a": 1}),
    "text".encode("utf-16"),
    "text".encode("utf-16-le"),
    gzip.compress(b"text"),
    zstandard.compress(b"text"),
]


@pytest.mark.parametrize("name", ["data", "a.jsonl", "a.txt.gz", "a.txt.zst", "a.xlsx"])
def test_binary_files_under_names_of_text(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    packers = {".gz": gzip.compress, ".zst": zstandard.compress}
    for data in BINARIES:
        file.write_bytes(packers.get(file.suffix, bytes)(data))
        with pytest.raises(DataError, match=naming(file)):
            list(file_corpus((file,), "text").pieces())


def test_a_folder_is_all_files_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl.gz", "b/[1]/b.jsonl.gz", "d.txt", "s.bin", "s.idx", ".hidden/no.xls"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    names = [file.relative_to(tmp_path).as_posix() for file in find_files(str(tmp_path))]
    assert names == ["a.jsonl.gz", "b/[1]/b.jsonl.gz", "d.txt", "s.idx"]
    assert "1 of 6 files" in caplog.text
    assert find_files(str(tmp_path / "b/[1]")) == [tmp_path / "b/[1]/b.jsonl.gz"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=naming("dataset_path", tmp_path / "none")):
        find_files(str(tmp_path / "none"))


def test_entries_keep_their_order_and_local_ones_are_looked_for_first(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("text")
    entries = [f"file://{tmp_path}/b.txt", str(tmp_path / "a.txt")]
    found = find_all(entries, cache=str(tmp_path / "cache"))
    assert [[file.name for file in files] for files in found] == [["b.txt"], ["a.txt"]]
    with pytest.raises(DataError, match=r"none\.txt"):
        find_all(["nowhere://bucket/a.txt", str(tmp_path / "none.txt")], cache="unused")


def test_the_first_mistake_of_each_file_before_the_work(tmp_path: Path) -> None:
    contents = {
        "a.jsonl": b'{"text": "a"}',
        "b.jsonl": b"{\n5",
        "c.txt": b"\xff",
        "d.jsonl": b'{"texts": "a"}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    corpus = file_corpus(tuple(tmp_path / name for name in contents), "text")
    with pytest.raises(DataError) as caught:
        cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(tmp_path / "cache"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for name, line in zip("bcd", lines, strict=True):
        assert f"{tmp_path}/{name}" in line

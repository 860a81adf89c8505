"""Which files are taken, and what is said of those that are not."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
import zstandard

from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data import readers
from torchtitan.data.corpus import file_corpus
from torchtitan.data.files import find_all, find_files
from torchtitan.data.readers import TEXT_SUFFIXES, suffix_of


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
    wrong = ("*.no", "empty.txt", "e*.txt", "dee*", "e*.tx[t]", "x" * 5000)
    for pattern in (*(str(tmp_path / name) for name in wrong), "~nobody-such/a.txt", "hf://a/b"):
        with pytest.raises(DataError, match=r"^dataset_path: "):
            find_files(pattern)


def test_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert find_files(str(tmp_path / "b.txt")) == [tmp_path / "b.txt"]
    (tmp_path / "c.txt").symlink_to("gone.txt")
    for pattern in ("c.txt", "*.txt"):
        with pytest.raises(DataError, match=r"c\.txt"):
            find_files(str(tmp_path / pattern))


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.xlsx", ".xlsx"),
        ("a.tar.gz", ".tar"),
        ("a.jsonl.lz4", ".lz4"),
        ("a.parquet.gz", ".parquet"),
        ("a.BIN", ".bin"),
        ("a.bin.gz", ".bin"),
    ],
)
def test_suffixes_that_are_refused(tmp_path: Path, name: str, suffix: str) -> None:
    (tmp_path / name).write_text("text,of,a,table\n1,2,3,4\n")
    (tmp_path / "good.txt").write_text("text")
    for pattern in (name, "*"):
        with pytest.raises(DataError, match=naming(tmp_path / name, f"'{suffix}'")):
            find_files(str(tmp_path / pattern))


@pytest.mark.parametrize(
    "name", ["README", "part-00001", "a.py", "a.md", "A.TXT", "a.c.gz", "Vol. 2 of many", ".txt"]
)
def test_text_of_any_name(tmp_path: Path, name: str) -> None:
    text = "PAR1 and BZh are words, é too\n"
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (file,) = find_files(str(tmp_path / name))
    assert suffix_of(file) in TEXT_SUFFIXES
    assert [p.text for p in file_corpus((file,), "text").pieces()] == [text]


BINARIES = [
    b"PAR1\x15\x04\x15\x80\0",
    pickle.dumps({"a": 1}),
    "text".encode("utf-16"),
    "text é".encode("utf-16-le"),
    b"%PDF-1.7\n%\xe2\xe3",
    gzip.compress(b"text"),
    zstandard.compress(b"text"),
    b"version https://git-lfs.github.com/spec/v1\noid",
    b"some\0text",
]


@pytest.mark.parametrize("name", ["data", "a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst"])
def test_binary_files_under_names_of_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "0.txt").write_text("good")
    file = tmp_path / name
    packers = {".gz": gzip.compress, ".zst": zstandard.compress}
    for data in BINARIES:
        file.write_bytes(packers.get(file.suffix, bytes)(data))
        files = find_files(str(tmp_path / "0.txt")) + find_files(str(file))
        pieces = file_corpus(tuple(files), "text").pieces()
        with pytest.raises(DataError, match=naming(file)):
            list(pieces)


def test_a_folder_is_all_files_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl.gz", "b/[1]/b.jsonl.gz", "d.txt", "s.bin", "s.idx", ".hidden/no.xls"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    names = [file.relative_to(tmp_path).as_posix() for file in find_files(str(tmp_path))]
    assert names == ["a.jsonl.gz", "b/[1]/b.jsonl.gz", "d.txt", "s.idx"]
    assert "1 of 5 files" in caplog.text
    assert find_files(str(tmp_path / "b/[1]")) == [tmp_path / "b/[1]/b.jsonl.gz"]
    (tmp_path / "b/t.xls").write_text("text")
    with pytest.raises(DataError, match=naming(tmp_path / "b/t.xls")):
        find_files(str(tmp_path))
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


def test_the_first_mistake_of_each_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {
        "a.jsonl": b'{"text": "a"}',
        "b.jsonl": b'{"text": "a"}\n{\n5',
        "c.txt": b"\xff",
        "d.jsonl": b'{"texts": "a"}',
        "e.jsonl": b'{"text": "a"}\n{"texts": "a"}\n',
        "f.txt": b"a\0b",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    def told(names: str) -> list[str]:
        files = tuple(tmp_path / name for name in contents if name[0] in names)
        with pytest.raises(DataError) as caught:
            [*file_corpus(files, "text").pieces()]
        assert (caught.value.key == "dataset_text_key") == (names == "ade")
        return str(caught.value).splitlines()

    lines = told("abcdef")
    assert len(lines) == 5
    for name, place in zip(
        "bcdef", ("line 2", "0xff", "line 1", "line 2", "offset 1"), strict=True
    ):
        [line] = [line for line in lines if f"{tmp_path}/{name}" in line]
        assert place in line
    assert len(told("abcde")) == 4  # the start of each file is right
    assert len(told("ade")) == 2  # told under their setting
    monkeypatch.setattr(readers, "MAX_MISTAKES", 2)
    assert told("abcde")[2:] == ["and 1 more"]


def test_all_entries_that_are_wrong_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.xls", "b.zip", "c.txt"):
        (tmp_path / name).write_text("text")
    entries = [str(tmp_path / name) for name in ("*", "c.txt", "none.txt")]
    with pytest.raises(DataError) as caught:
        find_all(entries, cache="unused")
    found = str(caught.value).splitlines()
    assert len(found) == 3
    for name, line in zip(("a.xls", "b.zip", "none.txt"), found, strict=True):
        assert str(tmp_path / name) in line
    monkeypatch.setattr(readers, "MAX_MISTAKES", 1)
    with pytest.raises(DataError) as caught:
        find_files(str(tmp_path))
    assert str(caught.value).splitlines()[1:] == ["and 1 more"]

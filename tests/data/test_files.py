"""Which files are taken, and what is said of those that are not."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
import zstandard

from torchtitan.base.errors import DataError
from torchtitan.data import readers
from torchtitan.data.corpus import FileCorpus
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
    for pattern, said in [
        ("*.no", "no file matches"),
        ("empty.txt", "must not be empty"),
        ("e*.txt", "must not be empty"),
        ("dee*", "no file matches"),
        ("e*.tx[t]", "must not be empty"),
        ("x" * 5000, "cannot look for .*: File name too long"),
    ]:
        with pytest.raises(DataError, match=said):
            names(pattern)


def test_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "0.txt").symlink_to("a.txt")
    (tmp_path / "again").symlink_to(tmp_path)
    assert find_files(str(tmp_path / "**/*.txt")) == [tmp_path / "a.txt"]
    assert "read once" in caplog.text
    assert find_files(str(tmp_path / "0.txt")) == [tmp_path / "0.txt"]
    (tmp_path / "b.txt").symlink_to("gone.txt")
    for pattern in ("b.txt", "*.txt"):
        with pytest.raises(DataError, match=r"b\.txt is a link to gone\.txt"):
            find_files(str(tmp_path / pattern))


@pytest.mark.parametrize("name", ["part-00000", "a.gz", "a.txt"])
def test_json_lines_by_other_names_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    data = b'{"text": "a"}\n{"text": "b"}\n'
    for file in (tmp_path / name, tmp_path / f"2{name}"):
        file.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    corpus = FileCorpus((tmp_path / name, tmp_path / f"2{name}"), "text")
    assert len([*corpus.pieces(lambda n: None)]) == 2
    assert caplog.text.count("2 files in JSON Lines") == 1
    assert str(tmp_path / name) in caplog.text
    caplog.clear()
    (tmp_path / name).write_text('{"text is all this is\nand no JSON}\n')
    [*FileCorpus((tmp_path / name,), "text").pieces(lambda n: None)] if "gz" not in name else ()
    assert "JSON Lines" not in caplog.text


def test_the_home_of_nobody() -> None:
    with pytest.raises(DataError, match=r"^dataset_path: cannot look for '~nobody-such"):
        find_files("~nobody-such/a.txt")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.xlsx", r"unsupported suffix '\.xlsx'; supported are .*\.jsonl, .*\.bin"),
        ("a.zip", r"unsupported suffix '\.zip'"),
        ("a.tar.gz", r"unsupported suffix '\.tar'"),
        ("a.jsonl.lz4", r"unsupported suffix '\.lz4'"),
        ("a.parquet.gz", r"\.parquet files must not be compressed"),
        ("a.BIN", r"unsupported suffix '\.bin'.*lower case"),
        ("a.bin.gz", r"\.bin files must not be compressed"),
        ("a.xyz", r"unsupported suffix '\.xyz'.*\.txt"),
    ],
)
def test_suffixes_that_are_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_text("text,of,a,table\n1,2,3,4\n")
    (tmp_path / "good.txt").write_text("text")
    for pattern in (name, "*"):
        with pytest.raises(DataError, match=said) as caught:
            find_files(str(tmp_path / pattern))
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["README", "part-00001", "a.py", "a.md", "A.TXT", "a.c.gz", "Vol. 2 of many", ".txt"]
)
def test_text_of_any_name(tmp_path: Path, name: str) -> None:
    text = "PAR1 and BZh are words, é too\n"
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (file,) = find_files(str(tmp_path / name))
    assert suffix_of(file) in TEXT_SUFFIXES
    assert [p.text for p in FileCorpus((file,), "text").pieces(lambda n: None)] == [text]


def test_letters_of_a_suffix_may_be_large(tmp_path: Path) -> None:
    file = tmp_path / "A.JSONL.GZ"
    file.write_bytes(gzip.compress(b'{"text": "a"}'))
    assert [p.text for p in FileCorpus((file,), "text").pieces(lambda n: None)] == ["a"]


ZEROS = "zero bytes"
BINARIES = {
    b"PAR1\x15\x04\x15\x80\0": ZEROS,
    pickle.dumps({"a": 1}): ZEROS,
    b"\x89PNG\r\n\x1a\n\0": ZEROS,
    "text".encode("utf-16"): "convert UTF-16",
    "text é".encode("utf-16-le"): "convert UTF-16",
    b"%PDF-1.7\n%\xe2\xe3": "must be UTF-8.*0xe2 at byte offset 10|must be one JSON",
    gzip.compress(b"text"): f"{ZEROS}|must be UTF-8",
    zstandard.compress(b"text"): f"{ZEROS}|must be UTF-8",
    b"version https://git-lfs.github.com/spec/v1\noid": "pointer of Git LFS.*git lfs pull",
    b"some\0text": r"zero bytes, .* at byte offset 4",
}


@pytest.mark.parametrize("name", ["data", "a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("data", BINARIES, ids=BINARIES.values())
def test_binary_files_under_names_of_text(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "0.txt").write_text("good")
    file = tmp_path / name
    packers = {".gz": gzip.compress, ".zst": zstandard.compress}
    file.write_bytes(packers.get(file.suffix, bytes)(data))
    files = find_files(str(tmp_path / "0.txt")) + find_files(str(file))
    with pytest.raises(DataError, match=BINARIES[data]) as caught:
        [*FileCorpus(tuple(files), "text").pieces(lambda num_bytes: None)]
    assert str(file) in str(caught.value)


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
    with pytest.raises(DataError, match=r"b/t\.xls has the unsupported suffix"):
        find_files(str(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"^dataset_path: no file matches"):
        find_files(str(tmp_path / "none"))


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
            [*FileCorpus(files, "text").pieces(lambda num_bytes: None)]
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
    assert told("abcde")[2:] == [f"not checked: 2 files from {tmp_path}/d.jsonl on"]
    monkeypatch.setattr(readers, "MAX_CHECKED_BYTES", 0)
    assert told("abcde")[1:] == [f"not checked: 3 files from {tmp_path}/c.txt on"]


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

"""Which files are taken, and what is said of those that are not."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save

from torchtitan.base.errors import DataError
from torchtitan.data.files import BY_SUFFIX, READ, find_files, kind_of
from torchtitan.data.source import FileCorpus, read_pieces


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
        ("dee*", "matches folders; name files"),
        ("e*.tx[t]", "must not be empty"),
        ("x" * 5000, "cannot look for .*: File name too long"),
    ]:
        with pytest.raises(DataError, match=said):
            names(pattern)


def test_the_home_of_nobody() -> None:
    with pytest.raises(DataError, match=r"training\.dataset_path: cannot look for '~nobody-such"):
        find_files("~nobody-such/a.txt")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.csv", r"is a table \(CSV\).*csv\.DictReader\(open\('.*/a\.csv'\)\).* > .*/a\.jsonl"),
        ("a.TSV", r"is a table \(TSV\).*delimiter='\\t'"),
        ("a.parquet", r"is Parquet.*pandas\.read_parquet\('.*a\.parquet'\)"),
        ("a.arrow", r"is Arrow.*Dataset\.from_file"),
        ("a.csv.gz", "CSV"),
        ("a.tar.gz", "an archive.*; unpack it"),
        ("a.tgz", "an archive"),
        ("a.zip", "an archive"),
        ("a.jsonl.bz2", "compressed in another way .*; unpack it, or pack"),
        ("a.npy", "an array"),
        ("a.pkl", "pickled"),
        ("a.safetensors", "weights"),
        ("a.png", "an image"),
        ("a.pdf", "is PDF.*pdftotext"),
        ("a.docx", "pandoc"),
        ("a.xyz", r"has the suffix '\.xyz'; if it is plain text, .*\.txt"),
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
    assert kind_of(file) == "text"
    assert [p.text for p in FileCorpus((file,), "text").pieces(lambda n: None)] == [text]


def test_letters_of_a_suffix_may_be_large(tmp_path: Path) -> None:
    file = tmp_path / "A.JSONL.GZ"
    file.write_bytes(gzip.compress(b'{"text": "a"}'))
    assert [p.text for p in read_pieces(file, text_key="text", advance=lambda n: None)] == ["a"]


def test_no_suffix_is_both_taken_and_refused() -> None:
    assert not READ.keys() & BY_SUFFIX.keys()


def archive(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as made:
            made.writestr("a.txt", "text")
    else:
        with tarfile.open(fileobj=file, mode="w") as made:
            made.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(9))
    return file.getvalue()


BINARIES = {
    b"PAR1\x15\x04\x15\x80\0": "is Parquet",
    b"ARROW1\0\0\xff\xff": "is Arrow",
    archive("zip"): "an archive",
    archive("tar"): "an archive",
    array(): "an array of numbers",
    pickle.dumps({"a": 1}): "pickled",
    save({"a": np.zeros(3)}): "weights",
    b"%PDF-1.7\n%\xe2\xe3": "is PDF",
    b"\x89PNG\r\n\x1a\n\0": "an image",
    b"BZh91AY&SY\xff\0": "another way than gzip",
    gzip.compress(b"text"): r"of the kind \.gz; give it that suffix",
    zstandard.compress(b"text"): r"of the kind \.zst",
    "text".encode("utf-16"): "is UTF-16; .*iconv -f utf-16",
    b"some\0text": r"no zero bytes, .* at byte offset 4, .*tr -d",
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
        next(FileCorpus(tuple(files), "text").pieces(lambda num_bytes: None))
    assert str(file) in str(caught.value)


def test_a_folder_says_what_a_glob_would_take(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(DataError, match=r"dataset_path must name files, .* is a folder") as e:
            find_files(str(tmp_path))
        return str(e.value)

    assert "no file is in it" in said()
    for name in ("b/t.csv", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "nothing has a suffix that is read: b/t.csv, c.png (2 files)" in said()
    for name in ("a.jsonl.gz", "b/b.jsonl.gz", "d.txt", "s.bin", "s.idx", "README"):
        (tmp_path / name).touch()
    globs = [f"{tmp_path}/**/*{end}" for end in (".idx (1 file)", ".jsonl.gz (2 files)", ".txt (1")]
    assert ", ".join(globs) in said()
    assert "leave out README, b/t.csv, c.png (3 files)" in said()

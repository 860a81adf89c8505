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
from torchtitan.data.files import find_files
from torchtitan.data.formats import BY_SUFFIX, READ, TEXT, format_of
from torchtitan.data.source import FileCorpus


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
        ("$HOME/a.txt", "variables are not filled in"),
        ("a.txt,b.txt", r"a list: \[\"a.txt\", \"b.txt\"\]"),
        ("dir[1]/*.txt", r"\[\[\] for \["),
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
        with pytest.raises(DataError, match=r"b\.txt is a link to gone\.txt, .*remove the link"):
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
        ("a.xlsx", r"is a table; export it as \.csv"),
        ("a.parquet.gz", "Parquet files must not be packed, .*; unpack it"),
        ("a.zip.zst", "zip archive files must not be packed"),
        ("a.7z", "an archive.*; unpack it"),
        ("a.jsonl.bz2", "compressed in another way .*; unpack it, or pack"),
        ("a.npy", "an array"),
        ("a.pkl", "pickled"),
        ("a.safetensors", "weights"),
        ("a.png", "an image"),
        ("a.pdf", "is PDF.*pdftotext"),
        ("a.docx", "pandoc"),
        ("a.BIN", r"\.bin and \.idx, in lower case"),
        ("a.bin.gz", "not packed"),
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
    assert format_of(file) is TEXT
    assert [p.text for p in FileCorpus((file,), "text").pieces(lambda n: None)] == [text]


def test_letters_of_a_suffix_may_be_large(tmp_path: Path) -> None:
    file = tmp_path / "A.JSONL.GZ"
    file.write_bytes(gzip.compress(b'{"text": "a"}'))
    assert [p.text for p in FileCorpus((file,), "text").pieces(lambda n: None)] == ["a"]


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
    b"PAR1\x15\x04\x15\x80\0": r"not text but a \.parquet file; give it that suffix",
    b"ARROW1\0\0\xff\xff": r"not text but a \.arrow file",
    archive("zip"): r"not text but a \.zip file",
    archive("tar"): r"not text but a \.tar file",
    array(): "an array of numbers",
    pickle.dumps({"a": 1}): "pickled",
    save({"a": np.zeros(3)}): "weights",
    b"%PDF-1.7\n%\xe2\xe3": "is PDF",
    b"\x89PNG\r\n\x1a\n\0": "an image",
    b"BZh91AY&SY\xff\0": "another way than gzip",
    gzip.compress(b"text"): r"not text but a \.gz file; (give it|unpack it once)",
    zstandard.compress(b"text"): r"not text but a \.zst file",
    "text".encode("utf-16"): "is UTF-16; .*iconv -f utf-16",
    "text".encode("utf-32"): "is UTF-32; .*iconv -f utf-32",
    "text é".encode("utf-16-le"): "is UTF-16LE; .*iconv -f utf-16le",
    b"version https://git-lfs.github.com/spec/v1\noid": "pointer of Git LFS.*git lfs pull",
    b"some\0text": r"no zero bytes, .* at byte offset 4; .*tr -d",
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


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".jsonl.zst"])
def test_what_is_under_the_name_of_a_packed_file(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    file = tmp_path / f"a.txt{suffix}"
    for data, said in [
        (b"version https://git-lfs.github.com/spec", "lfs"),
        (pack(pack(b"a")), "unpack it once"),
    ]:
        file.write_bytes(data)
        with pytest.raises(DataError, match=said):
            next(FileCorpus((file,), "text").pieces(lambda num_bytes: None))


def test_a_folder_says_what_a_glob_would_take(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(DataError, match=r"^dataset_path: must name files, .* is a folder") as e:
            find_files(str(tmp_path))
        return str(e.value)

    assert "is a folder without files" in said()
    for name in ("b/t.xls", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "no file has a suffix that can be read: b/t.xls, c.png (2 files)" in said()
    for name in ("a.jsonl.gz", "b/b.jsonl.gz", "d.txt", "s.bin", "s.idx", "README"):
        (tmp_path / name).touch()
    globs = [f"{tmp_path}/**/*{end}" for end in (".idx (1 file)", ".jsonl.gz (2 files)", ".txt (1")]
    assert ", ".join(globs) in said()
    assert "leave out README, b/t.xls, c.png (3 files)" in said()

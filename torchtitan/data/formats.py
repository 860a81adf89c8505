"""How a file is read: by its name, checked against its first bytes.

Only what is known to be text is read as text. A suffix has to be in the table `READ`. Any other is
refused, with its format and a way to convert it where these are known. A name may lack a suffix or
have a wrong one, so the first bytes are checked too, and a binary file is refused whatever its
name. Guessing the format from the contents alone would take a CSV table for text.

A format is a name and a reader of its rows (`rows_json.py`, `rows_table.py`), or of what an archive
holds (`parts.py`). A new one is one function and one line of `SUFFIXES`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from torchtitan.base.errors import DataError
from torchtitan.data.parts import HEAD_BYTES, Members, Stream, tar_members, zip_members
from torchtitan.data.rows import Reader
from torchtitan.data.rows_json import read_json, read_json_lines
from torchtitan.data.rows_table import read_arrow, read_parquet, read_table
from torchtitan.data.text import check_fetched


@dataclass(frozen=True)
class Format:
    """One way to read a file. Without `rows` and `members` it is text, one document, or a store."""

    name: str
    rows: Reader | None = None
    """What reads its rows."""
    members: Callable[[Stream, PurePath], Members] | None = None
    """What opens the files in an archive."""
    is_text: bool = True
    is_streamed: bool = True
    """Whether it is read from its beginning to its end, so that it may be packed or in an
    archive."""


TEXT = Format("text")
STORE = Format("token store", is_text=False, is_streamed=False)
ZIP = Format("zip archive", members=zip_members, is_text=False, is_streamed=False)
TAR = Format("tar archive", members=tar_members, is_text=False)
PARQUET = Format("Parquet", read_parquet, is_text=False, is_streamed=False)
ARROW = Format("Arrow", read_arrow, is_text=False, is_streamed=False)

PROSE = "txt text md markdown mdx rst adoc org tex bib log tokens srt vtt html htm xml xhtml"
SETTINGS = "yaml yml toml ini cfg conf properties cmake mk make gradle dockerfile proto jinja"
SOURCES = (
    "py pyi pyx c h cc cpp cxx hh hpp hxx cu cuh m mm java kt kts scala groovy js jsx mjs cjs ts "
    "tsx vue svelte css scss less go rs rb php pl pm lua r jl swift sh bash zsh fish ps1 bat sql "
    "hs ml mli fs fsx cs vb ex exs erl hrl clj cljs lisp el scm rkt f f90 f95 for asm s v sv vhd "
    "vhdl dart zig nim d ada adb ads pas lean thy coq agda tcl awk sed diff patch graphql"
)
SUFFIXES: Mapping[str, Format] = {
    f"{PROSE} {SETTINGS} {SOURCES}": TEXT,
    "jsonl ndjson": Format("JSON Lines", read_json_lines),
    "json": Format("JSON", read_json),
    "csv": Format("CSV", partial(read_table, delimiter=",")),
    "tsv": Format("TSV", partial(read_table, delimiter="\t")),
    "parquet": PARQUET,
    "arrow feather": ARROW,
    "zip": ZIP,
    "tar tgz": TAR,
    "bin idx": STORE,
}
READ: Mapping[str, Format] = {
    "": TEXT,
    **{f".{suffix}": how for suffixes, how in SUFFIXES.items() for suffix in suffixes.split()},
}
"""How a file of each suffix is read; a suffix of `PACKED` may follow it."""
PACKED = {".gz", ".zst"}
STORES = {".bin", ".idx"}

UNPACK = "unpack it and name the files that are in it"
REPACK = "unpack it, or pack it anew with gzip or zstd"
NO_TEXT = "it holds no text: leave it out"
EXPORT = "write its text into a .txt file, for example with: pandoc -t plain -o {stem}.txt {file}"
OBJECTS = 'write its texts as .jsonl, one {{"text": ...}} a line'

REFUSED: Mapping[str, tuple[str, str]] = {
    "orc avro xlsx xls ods": ("a table", "export it as .csv or .parquet"),
    "sqlite sqlite3 db duckdb mdb lmdb": ("a database", OBJECTS),
    "tbz2 txz 7z rar": ("an archive", UNPACK),
    "bz2 xz lz4 lzma br sz": ("compressed in another way than gzip or zstd", REPACK),
    "npy npz h5 hdf5 mat": ("an array of numbers", OBJECTS),
    "tfrecord record mds": ("a file of records", OBJECTS),
    "pkl pickle pt pth ckpt joblib": ("pickled, and reading it could run code", OBJECTS),
    "safetensors gguf onnx": ("a file of weights", NO_TEXT),
    "ipynb": ("a notebook", "convert it: jupyter nbconvert --to script {file}"),
    "pdf": ("PDF", "convert it: pdftotext {file} {stem}.txt"),
    "doc docx odt rtf epub ppt pptx": ("a document with its layout", EXPORT),
    "png jpg jpeg gif webp bmp tif tiff svg ico": ("an image", NO_TEXT),
    "wav mp3 flac ogg m4a mp4 mkv avi mov webm": ("sound or film", NO_TEXT),
    "so o a dll exe pyc class jar whl wasm": ("a program", NO_TEXT),
}
BY_SUFFIX = {
    f".{suffix}": refusal for suffixes, refusal in REFUSED.items() for suffix in suffixes.split()
}
# the suffix that a file should have, by the bytes at an offset; others are refused as binary
MAGIC: Mapping[tuple[int, bytes], str] = {
    (0, b"\x1f\x8b"): ".gz",
    (0, b"\x28\xb5\x2f\xfd"): ".zst",
    (0, b"MMIDIDX\0"): ".idx",
    (0, b"PAR1"): ".parquet",
    (0, b"ARROW1"): ".arrow",
    (0, b"\xff\xff\xff\xff"): ".arrow",
    (0, b"SQLite format 3\0"): ".sqlite",
    (0, b"PK\x03\x04"): ".zip",
    (257, b"ustar"): ".tar",
    (0, b"7z\xbc\xaf"): ".7z",
    (0, b"BZh"): ".bz2",
    (0, b"\xfd7zXZ"): ".xz",
    (0, b"\x93NUMPY"): ".npy",
    **{(0, b"\x80" + bytes([protocol])): ".pkl" for protocol in range(2, 6)},
    (8, b'{"'): ".safetensors",
    (0, b"GGUF"): ".gguf",
    (0, b"%PDF"): ".pdf",
    (0, b"\x89PNG"): ".png",
    (0, b"\xff\xd8\xff"): ".jpg",
    (0, b"\x7fELF"): ".so",
}
# UTF-32's before UTF-16's, with which it begins
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def suffix_of(file: PurePath) -> str:
    """Return the suffix that decides how a file is read, in lower case, before that of packing.

    What follows a dot is no suffix if it holds a space.
    """
    inner = PurePath(file.stem) if file.suffix.lower() in PACKED else file
    return "" if " " in inner.suffix else inner.suffix.lower()


def format_of(file: PurePath) -> Format:
    """Return how a file is read, by its name; raise DataError if it is not read."""
    suffix = suffix_of(file)
    if suffix in BY_SUFFIX:
        raise _refusal(file, suffix)
    if suffix not in READ:
        raise DataError(
            f"data are read from {_names()}, {file} has the suffix {suffix!r}; if it is plain "
            f"text, give it the suffix .txt"
        )
    how = READ[suffix]
    if how is STORE and file.suffix not in STORES:
        raise DataError(
            f"the two files of a token store must end in .bin and .idx, in lower case and not "
            f"packed, got {file}; unpack or rename both"
        )
    if not how.is_streamed and file.suffix.lower() in PACKED:
        raise DataError(f"{how.name} files must not be packed, got {file}; unpack it")
    return how


def _names() -> str:
    """Name the formats, with a few of their suffixes."""
    suffixes: dict[str, list[str]] = {}
    for suffix, how in READ.items():
        suffixes.setdefault(how.name, []).append(suffix)
    suffixes[TEXT.name] = [".txt", ".md", "source code ..."]
    return ", ".join(f"{name} ({', '.join(some)})" for name, some in suffixes.items())


def check_contents(file: PurePath, head: bytes) -> None:
    """Raise DataError if the first bytes of a file, unpacked, are not those of text."""
    check_fetched(file, head)
    if b"\0" in head and (encoding := _wide_encoding(head)):
        raise DataError(
            f"text must be UTF-8: {file} is {encoding.upper()}; convert it: "
            f"iconv -f {encoding} -t utf-8 {file} > new.txt"
        )
    # some of the marks are letters, so text may begin with one
    if b"\0" not in head and _is_utf8(head):
        return
    for (place, magic), suffix in MAGIC.items():
        if head.startswith(magic, place):
            if suffix in BY_SUFFIX:
                raise _refusal(file, suffix)
            packed = file.suffix.lower() in PACKED and suffix in PACKED
            way = "unpack it once" if packed else "give it that suffix"
            raise DataError(f"{file} is not text but a {suffix} file; {way}")
    if b"\0" in head:
        raise DataError(
            f"text must have no zero bytes, {file} has one at byte offset {head.index(0)}; leave "
            f"binary files out, convert encodings such as UTF-16 with iconv, or remove the bytes: "
            f"tr -d '\\000' < {file}"
        )


def _wide_encoding(head: bytes) -> str | None:
    """Return the encoding of text in 2 or 4 bytes per letter, by its mark or its zeros."""
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    first, second = head[::2], head[1::2]
    for zeros, letters, encoding in ((second, first, "utf-16le"), (first, second, "utf-16be")):
        if 0 not in letters and 2 * zeros.count(0) > len(zeros):
            return encoding
    return None


def _is_utf8(head: bytes) -> bool:
    """Return whether bytes are UTF-8; the last character may be cut."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return len(head) == HEAD_BYTES and error.start > len(head) - 4
    return True


def _refusal(file: PurePath, suffix: str) -> DataError:
    what, way = BY_SUFFIX[suffix]
    # {stem}: the file without its suffixes, in the same folder
    way = way.format(file=file, stem=file.with_name(file.name.split(".")[0] or "text"))
    return DataError(f"data must be text, rows or token stores, {file} is {what}; {way}")

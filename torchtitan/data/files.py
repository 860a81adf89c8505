"""Which files are read, and how: by their names and their first bytes.

Only what is known to be text is read as text. A suffix has to be in the table `READ`. Any other is
refused, with its format and a way to convert it where these are known. A name may lack a suffix or
have a wrong one, so the first bytes are checked too, and a binary file is refused whatever its
name. Guessing the format from the contents alone would take a CSV table for text.
"""

from __future__ import annotations

import codecs
import glob
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from os.path import exists, realpath
from pathlib import Path
from typing import Literal

from torchtitan.base.errors import DataError, Violation
from torchtitan.base.log import amount
from torchtitan.data.text import check_fetched

logger = logging.getLogger(__name__)

Kind = Literal["lines", "store", "text"]

PROSE = "txt text md markdown mdx rst adoc org tex bib log tokens srt vtt html htm xml xhtml"
SETTINGS = "yaml yml toml ini cfg conf properties cmake mk make gradle dockerfile proto jinja"
SOURCES = (
    "py pyi pyx c h cc cpp cxx hh hpp hxx cu cuh m mm java kt kts scala groovy js jsx mjs cjs ts "
    "tsx vue svelte css scss less go rs rb php pl pm lua r jl swift sh bash zsh fish ps1 bat sql "
    "hs ml mli fs fsx cs vb ex exs erl hrl clj cljs lisp el scm rkt f f90 f95 for asm s v sv vhd "
    "vhdl dart zig nim d ada adb ads pas lean thy coq agda tcl awk sed diff patch graphql"
)
READ: Mapping[str, Kind] = {
    "": "text",
    **{f".{suffix}": "text" for suffix in f"{PROSE} {SETTINGS} {SOURCES}".split()},
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".bin": "store",
    ".idx": "store",
}
"""How a file of each suffix is read; a suffix of `COMPRESSED` may follow it."""
COMPRESSED = {".gz", ".zst"}
STORE = {suffix for suffix, kind in READ.items() if kind == "store"}

UNPACK = "unpack it and name the files that are in it"
REPACK = "unpack it, or pack it anew with gzip or zstd"
NO_TEXT = "it holds no text: leave it out"
ROWS = (
    'convert it: python -c "import csv, json; [print(json.dumps(row)) for row in csv.DictReader('
    "open('{file}'){tabs})]\" > {stem}.jsonl; the key of the text is its column's name"
)
PARQUET = (
    "convert it: python -c \"import pandas; pandas.read_parquet('{file}').to_json('{stem}.jsonl', "
    "orient='records', lines=True)\"; the key of the text is its column's name"
)
ARROW = (
    "convert it: python -c \"import datasets; datasets.Dataset.from_file('{file}').to_json("
    "'{stem}.jsonl')\"; the key of the text is its column's name"
)
EXPORT = "write its text into a .txt file, for example with: pandoc -t plain -o {stem}.txt {file}"
OBJECTS = 'write its texts as .jsonl, one {{"text": ...}} a line'

REFUSED: Mapping[str, tuple[str, str]] = {
    "csv": ("a table (CSV)", ROWS),
    "tsv": ("a table (TSV)", ROWS),
    "parquet": ("Parquet", PARQUET),
    "arrow feather": ("Arrow", ARROW),
    "orc avro xlsx xls ods": ("a table", "export it as .csv and that as .jsonl"),
    "sqlite sqlite3 db duckdb mdb lmdb": ("a database", OBJECTS),
    "zip tar tgz tbz2 txz 7z rar": ("an archive", UNPACK),
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
OURS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"MMIDIDX\0": ".idx"}
HEAD_BYTES = 4096
HINTS = {
    "://": "nothing is downloaded: get the file first",
    "$": "variables are not filled in",
    ",": 'several paths are a list: ["a.txt", "b.txt"]',
    "[": "a glob takes [ab] for one of the letters a and b, and [[] for [",
}
MOST_LOOKED_AT, MOST_NAMED = 10_000, 20


def suffix_of(file: Path) -> str:
    """Return the suffix that decides how a file is read, in lower case, before that of packing.

    What follows a dot is no suffix if it holds a space.
    """
    inner = Path(file.stem) if file.suffix.lower() in COMPRESSED else file
    return "" if " " in inner.suffix else inner.suffix.lower()


def kind_of(file: Path) -> Kind:
    """Return how a file is read, by its name; raise DataError if it is not read."""
    suffix = suffix_of(file)
    if suffix in BY_SUFFIX:
        raise _refusal(file, suffix)
    if READ.get(suffix) == "store" and file.suffix not in STORE:
        raise DataError(
            f"the two files of a token store must end in .bin and .idx, in lower case and not "
            f"packed, got {file}; unpack or rename both"
        )
    if suffix not in READ:
        raise DataError(
            f"data are read from JSON Lines ({', '.join(_suffixes('lines'))}), token stores "
            f"({', '.join(_suffixes('store'))}) and text (.txt, .md, source code ...), {file} has "
            f"the suffix {suffix!r}; if it is plain text, give it the suffix .txt"
        )
    return READ[suffix]


def check_contents(file: Path, head: bytes) -> None:
    """Raise DataError if the first bytes of a file, unpacked, are not those of text."""
    check_fetched(file, head)
    for magic, suffix in OURS.items():
        if head.startswith(magic):
            packed = file.suffix.lower() in COMPRESSED and suffix in COMPRESSED
            way = "unpack it once" if packed else "give it that suffix"
            raise DataError(f"{file} is not text but a {suffix} file; {way}")
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
            raise _refusal(file, suffix)
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


def _refusal(file: Path, suffix: str) -> DataError:
    what, way = BY_SUFFIX[suffix]
    tabs = ", delimiter='\\t'" if suffix == ".tsv" else ""
    # {stem}: the file without its suffixes, in the same folder
    way = way.format(file=file, stem=file.with_name(file.name.split(".")[0] or "text"), tabs=tabs)
    return DataError(f"data must be text, JSON Lines or token stores, {file} is {what}; {way}")


def _suffixes(kind: Kind) -> list[str]:
    return [suffix for suffix, of in READ.items() if of == kind]


def user_path(path: str, *, key: str) -> Path:
    """Return the path that the setting `key` gives; raise DataError if it cannot be looked up."""
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    # a name that is too long, a folder without permission; the home of an unknown user
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(Violation((key,), f"cannot look for {path!r:.200}: {reason}")) from error
    return expanded


def find_files(pattern: str, *, key: str = "dataset_path") -> list[Path]:
    """Return the files that one entry of the setting `key` names, sorted.

    A token store appears once, as its `.idx` file. Empty files that a glob finds are left out.
    Raises DataError if there is no file, or one that is not read, or an empty one by its name.
    """
    path = user_path(pattern, key=key)
    if path.is_dir():
        raise DataError(Violation((key,), _folder_refusal(path, pattern)))
    if Path(f"{path}.idx").exists():
        path = Path(f"{path}.idx")
    named = path.exists()
    found = [path] if named else [Path(p) for p in glob.glob(str(path), recursive=True)]
    # realpath: without it a chain of over 40 links would count as broken
    if broken := [p for p in found if p.is_symlink() and not exists(realpath(p))]:
        rule = (
            f"{min(broken)} is a link to {min(broken).readlink()}, where there is no file; restore "
            f"that, or remove the link"
        )
        raise DataError(Violation((key,), rule))
    files = _without_links({_index_of(file) for file in found if file.is_file()})
    empty = {file for file in files if file.exists() and file.stat().st_size == 0}
    if not files:
        raise DataError(Violation((key,), _nothing(found, pattern)))
    for file in files:
        kind_of(file)
    if empty and (named or len(empty) == len(files)):
        raise DataError(Violation((key,), f"a file must not be empty: {min(empty)}; remove it"))
    if empty:
        logger.warning(
            "%d of %s in %s are empty and left out",
            len(empty),
            amount(len(files), "file"),
            pattern,
        )
    return [file for file in files if file not in empty]


def _without_links(files: set[Path]) -> list[Path]:
    """Return the files sorted, each once: a glob finds files again under links to folders."""
    kept: dict[Path, Path] = {}
    places = {file: file.resolve() for file in files}
    # a file before its links, then the shortest link
    for file in sorted(files, key=lambda file: (file != places[file], len(file.parts), file)):
        kept.setdefault(places[file], file)
    if len(kept) < len(files):
        logger.warning(
            "%s found again through links, each is read once",
            amount(len(files) - len(kept), "file"),
        )
    return sorted(kept.values())


def _index_of(file: Path) -> Path:
    return file.with_suffix(".idx") if file.suffix in STORE else file


def _nothing(found: list[Path], pattern: str) -> str:
    if found:
        others = "folders" if found[0].is_dir() else "special files"
        return f"{pattern!r} matches {others}; name files, or a glob into folders: **/*.jsonl"
    hints = "".join(f"; {hint}" for part, hint in HINTS.items() if part in pattern)
    return f"no file matches {pattern!r:.200}; relative paths begin at {Path.cwd()}{hints}"


def _folder_refusal(folder: Path, pattern: str) -> str:
    """Say which files of a folder globs would take, and which they would not."""
    paths = islice((path for path in folder.rglob("*") if path.is_file()), MOST_LOOKED_AT)
    taken: Counter[str] = Counter()
    left_out: list[str] = []
    for path in sorted(paths):
        # one glob for each store
        if path.suffix == ".bin" and path.with_suffix(".idx").exists():
            continue
        if suffix_of(path) not in READ or not path.suffix:
            left_out.append(path.relative_to(folder).as_posix())
        else:
            packed = path.suffix if path.suffix.lower() in COMPRESSED else ""
            taken[Path(path.name.removesuffix(packed)).suffix + packed] += 1
    says = f"must name files, {pattern!r} is a folder"
    if not taken and not left_out:
        return f"{says} without files"
    lists = f"{_listed(left_out)} ({amount(len(left_out), 'file')})"
    if not taken:
        return f"{says} in which no file has a suffix that can be read: {lists}"
    globs = (
        f"{folder.as_posix()}/**/*{suffix} ({amount(number, 'file')})"
        for suffix, number in sorted(taken.items())
    )
    rest = f"; these leave out {lists}" if left_out else ""
    return f"{says}; name globs: {', '.join(globs)}{rest}"


def _listed(names: Iterable[str]) -> str:
    shown = [*islice(names, MOST_NAMED + 1)]
    return ", ".join(shown[:MOST_NAMED]) + (" ..." if len(shown) > MOST_NAMED else "")

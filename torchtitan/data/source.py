"""Where text comes from: files on disk, read piece by piece, never a whole corpus at once.

A `Corpus` yields pieces of documents. Text files are one document each, however long; a line of a
JSON Lines file is one document. `.gz` and `.zst` are unpacked on the way. Text must be UTF-8: any
other byte is an error with its place, because replacing it would train on damaged text unnoticed.

A corpus also has an identity: what is cheap to know about its files (path, size, times), enough to
tell on this machine that nothing changed since they were tokenised. The built-in texts are corpora
too, in `builtin.py`.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from torchtitan.base.errors import DataError
from torchtitan.data.text import cut_point

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 20
JSON_LINES = {".jsonl", ".ndjson", ".json"}
COMPRESSED = {".gz", ".zst"}
STORE = {".bin", ".idx"}

Advance = Callable[[int], None]


class Piece(NamedTuple):
    """A part of a document's text; pieces of a document follow one another."""

    text: str
    ends_document: bool


class Corpus(Protocol):
    """Text that can be read again and again, always the same."""

    @property
    def name(self) -> str:
        """Return what to call it in messages."""

    @property
    def num_bytes(self) -> int:
        """Return its size for a progress bar; compressed where it is."""

    def identity(self) -> list[str]:
        """Return what changes when the text may have changed."""

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Yield all text in a fixed order; tell `advance` the bytes read since the last call."""


@dataclass(frozen=True)
class FileCorpus:
    """Text and JSON Lines files, in the order given."""

    files: tuple[Path, ...]
    text_key: str

    @property
    def name(self) -> str:
        """Return the file's name, or how many files there are."""
        return str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files"

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> list[str]:
        """Return path, size and times of each file, and the key of the text."""
        return [*map(file_identity, self.files), self.text_key]

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Yield the text of each file."""
        for file in self.files:
            yield from read_pieces(file, text_key=self.text_key, advance=advance)


def file_identity(file: Path) -> str:
    """Return a line that changes when the file is written or replaced."""
    status = file.stat()
    # the change time too: a copy that keeps sizes and modification times is still noticed
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def find_files(pattern: str) -> list[Path]:
    """Return the files that one entry of `training.dataset_path` names, sorted.

    A token store appears once, as its `.idx` file. Raises DataError when there is none, or when a
    file that is named, not found by a glob, is empty; empty ones found by a glob are left out.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise DataError(
            f"training.dataset_path must name files, {pattern!r} is a folder; "
            f"a glob takes all of one kind: {pattern.rstrip('/')}/**/*.txt of texts, "
            f"{pattern.rstrip('/')}/**/*.jsonl of JSON Lines, as examples are"
        )
    if Path(f"{path}.idx").exists():
        path = Path(f"{path}.idx")
    named = path.exists()
    found = [path] if named else [Path(p) for p in glob.glob(str(path), recursive=True)]
    files = sorted(
        {f.with_suffix(".idx") if f.suffix in STORE else f for f in found if f.is_file()}
    )
    empty = [file for file in files if file.exists() and file.stat().st_size == 0]
    if empty and (named or len(empty) == len(files)):
        raise DataError(f"a data file must not be empty: {empty[0]}; remove it from dataset_path")
    if empty:
        logger.warning(
            "%d of %d files of %s are empty and left out", len(empty), len(files), pattern
        )
    if not files:
        raise DataError(
            f"training.dataset_path: no file matches {pattern!r}; "
            f"relative paths begin at {Path.cwd()}"
        )
    return [file for file in files if file not in empty]


def read_pieces(file: Path, *, text_key: str, advance: Advance) -> Iterator[Piece]:
    """Yield the documents of one file; raise DataError for what cannot be read, with its place."""
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    lines = suffix in JSON_LINES
    num_pieces = 0
    with _readable(file), file.open("rb") as raw:
        blocks = _blocks(raw, kind=file.suffix, advance=advance)
        pieces = _json_lines(blocks, file, text_key) if lines else _text(blocks, file)
        for piece in pieces:
            num_pieces += 1
            yield piece
    if num_pieces == 0:
        raise DataError(f"a data file must not be empty: {file} holds no text; remove it")


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not blank, each with file and number for messages."""
    with _readable(file), file.open("rb") as raw:
        yield from _numbered(_blocks(raw, kind=file.suffix, advance=lambda num_bytes: None), file)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # a damaged .gz is an OSError without an error number
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"cannot read {file}: it is cut short or damaged ({error})") from error


def _blocks(raw: BinaryIO, *, kind: str, advance: Advance) -> Iterator[bytes]:
    """Yield the unpacked contents in blocks of about 1 MiB."""
    done = 0
    blocks = _unpack_zst(raw) if kind == ".zst" else _read(raw, gzipped=kind == ".gz")
    for block in blocks:
        advance(raw.tell() - done)
        done = raw.tell()
        yield block


def _read(raw: BinaryIO, *, gzipped: bool) -> Iterator[bytes]:
    file = gzip.GzipFile(fileobj=raw) if gzipped else raw
    while block := file.read(BLOCK_BYTES):
        yield block


def _unpack_zst(raw: BinaryIO) -> Iterator[bytes]:
    import zstandard

    # not stream_reader, which takes a cut file for a short one
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    while packed := raw.read(BLOCK_BYTES // 8):
        while packed:
            frame = frame or unpacker.decompressobj()
            try:
                block = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
            if block:
                yield block
    if frame is not None:
        raise EOFError("the last zstd frame has no end")


def _decode(
    data: bytes, file: Path, *, offset: int, final: bool, place: str = ""
) -> tuple[str, int]:
    """Return the text of `data` and the bytes used; fewer than all if the last character is cut."""
    try:
        text, used = codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        unpacked = " of the unpacked text" if file.suffix in COMPRESSED else ""
        raise DataError(
            f"text must be UTF-8: {file}{place} has an invalid byte "
            f"0x{data[error.start]:02x} at byte offset {offset + error.start}{unpacked}; "
            f"convert the file, for example with iconv"
        ) from error
    # a byte order mark is no text
    return (text[1:] if offset == 0 and text.startswith("\ufeff") else text), used


def _text(blocks: Iterator[bytes], file: Path) -> Iterator[Piece]:
    data, text, offset = b"", "", 0
    for block in blocks:
        data += block
        more, used = _decode(data, file, offset=offset, final=False)
        data, offset, text = data[used:], offset + used, text + more
        # one character is held back: the end of the document must not be an empty piece
        while len(text) > PIECE_CHARS:
            cut = cut_point(text, limit=PIECE_CHARS)
            yield Piece(text[:cut], ends_document=False)
            text = text[cut:]
    _decode(data, file, offset=offset, final=True)
    if text:
        yield Piece(text, ends_document=True)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _numbered(blocks: Iterator[bytes], file: Path) -> Iterator[tuple[str, str]]:
    offset = 0
    for number, line in enumerate(_lines(blocks), start=1):
        place = f" line {number}"
        text, _ = _decode(line, file, offset=offset, final=True, place=place)
        offset += len(line) + 1
        if text.strip():
            yield text, f"{file}{place}"


def _json_lines(blocks: Iterator[bytes], file: Path, text_key: str) -> Iterator[Piece]:
    for line, where in _numbered(blocks, file):
        if document := _document(line, text_key, where=where):
            yield Piece(document, ends_document=True)


def parse_line(line: str, *, where: str) -> object:
    """Return the value of a line of JSON, or raise DataError."""
    try:
        value: object = json.loads(line)
    except json.JSONDecodeError as error:
        # its own line number counts within the line
        what = f"{error.msg} at column {error.colno}"
        if line.lstrip().startswith("["):
            what += "; files hold one JSON object a line, not an array"
        raise DataError(f"{where} must be one JSON object: {what}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} must be one JSON object: {error}") from error
    return value


def check_characters(text: str, *, where: str) -> None:
    """Raise DataError for text with half a character, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} must hold whole characters, character {error.start} of its text is half of a "
            f"surrogate pair (\\ud800 to \\udfff); remove or replace it"
        ) from error


def _document(line: str, text_key: str, *, where: str) -> str:
    value = parse_line(line, where=where)
    if not isinstance(value, dict) or not isinstance(value.get(text_key), str):
        got = f"keys {', '.join(map(repr, value))}" if isinstance(value, dict) else "no object"
        raise DataError(
            f"{where} must be a JSON object with text under the key {text_key!r}, got {got}; "
            f"set training.dataset_text_key to the key of the text"
        )
    text: str = value[text_key]
    check_characters(text, where=where)
    return text

"""Text from files, read in pieces: a corpus is never held in memory.

A `Corpus` yields pieces of documents. A text file is one document, however long; so is each line of
a JSON Lines file. `.gz` and `.zst` files are unpacked while they are read. Text must be UTF-8: an
invalid byte is an error that names its place, since replacing it would train on damaged text
unnoticed. `files.py` decides which files are read, and how.

A packed file of a few KiB can hold terabytes of one letter. So files are unpacked a little at a
time. A file that grows as no text does is an error, and so is a line too long to be held.

A corpus has an identity, made of what is cheap to know about its files (path, size, times): enough
to tell on this machine that they have not changed since they were tokenised. The built-in texts are
corpora too, in `builtin.py`.
"""

from __future__ import annotations

import codecs
import gzip
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from torchtitan.base.errors import DataError, Violation
from torchtitan.base.log import amount
from torchtitan.data.files import (
    COMPRESSED,
    HEAD_BYTES,
    check_contents,
    kind_of,
)
from torchtitan.data.text import (
    ARRAY_ADVICE,
    check_characters,
    check_fetched,
    cut_point,
    parse_line,
    type_name,
)

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 20
MAX_LINE_BYTES = 1 << 28
# text is packed to a fifth, one letter by gzip to a thousandth; 4 bytes of zstd may hold 128 KiB
MAX_GROWTH, FREE_BYTES = 400, 1 << 26
PACKED_BYTES = 1 << 10

Advance = Callable[[int], None]


class Piece(NamedTuple):
    """A part of a document's text; pieces of a document follow one another."""

    text: str
    ends_document: bool


class Corpus(Protocol):
    """Text that can be read again and again, always the same."""

    @property
    def name(self) -> str:
        """Return its name for messages."""

    @property
    def num_bytes(self) -> int:
        """Return its size on disk, for the progress bar."""

    def identity(self) -> list[str]:
        """Return values that change whenever the text may have changed."""

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Yield all text in a fixed order; `advance` is called with each number of bytes read."""


@dataclass(frozen=True)
class Files:
    """Files in the order given."""

    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Return the name of the file, or the number of files."""
        return str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files"

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> list[str]:
        """Return path, size and times of each file."""
        return [*map(file_identity, self.files)]


@dataclass(frozen=True)
class FileCorpus(Files):
    """Text and JSON Lines files; `setting` is what errors call `text_key`."""

    text_key: str
    setting: str = "dataset_text_key"

    def identity(self) -> list[str]:
        """Return path, size and times of each file, and the key of the text."""
        return [*super().identity(), self.text_key]

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Check that no file is binary, then yield the text of each."""
        check_heads(self.files)
        for file in self.files:
            try:
                yield from read_pieces(file, text_key=self.text_key, advance=advance)
            except WrongKeyError as error:
                rule = f"{error}; write text there, or name the key that holds it"
                raise DataError(Violation((self.setting,), rule)) from error


class WrongKeyError(DataError):
    """A JSON object without text under the key."""


def file_identity(file: Path) -> str:
    """Return a string that changes when the file is written or replaced."""
    status = file.stat()
    # with the change time, which also differs for a copy of equal size and modification time
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def check_heads(files: Sequence[Path]) -> None:
    """Raise DataError for the first file that is not text; warn of JSON Lines read as text."""
    in_lines = []
    for file in files:
        with _readable(file), file.open("rb") as raw:
            check_fetched(file, raw.read(HEAD_BYTES))
            raw.seek(0)
            head = next(_unpacked(raw, file, size=HEAD_BYTES), b"")
        check_contents(file, head[:HEAD_BYTES])
        if kind_of(file) == "text" and _holds_lines(head[:HEAD_BYTES]):
            in_lines.append(file)
    if in_lines:
        logger.warning(
            "%s in JSON Lines, as %s, will be read as plain text, with keys and brackets, because "
            "of the suffix; to train on the texts alone, rename to .jsonl",
            amount(len(in_lines), "file"),
            in_lines[0],
        )


def _holds_lines(head: bytes) -> bool:
    """Return whether text begins like JSON Lines: with a line that is an object."""
    line, end, _ = head.removeprefix(codecs.BOM_UTF8).partition(b"\n")
    return line.startswith(b'{"') and (not end or line.rstrip().endswith(b"}"))


def read_pieces(file: Path, *, text_key: str, advance: Advance) -> Iterator[Piece]:
    """Yield the documents of one file; a DataError names the place of what cannot be read."""
    lines = kind_of(file) == "lines"
    num_pieces = 0
    with _readable(file), file.open("rb") as raw:
        blocks = _blocks(raw, file, advance=advance)
        pieces = _json_lines(blocks, file, text_key) if lines else _text(blocks, file)
        for piece in pieces:
            num_pieces += 1
            yield piece
    if num_pieces == 0:
        raise DataError(f"a data file must not be empty: {file} holds no text; remove it")


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, with its file and number for messages."""
    with _readable(file), file.open("rb") as raw:
        yield from _numbered(_blocks(raw, file, advance=lambda num_bytes: None), file)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # a damaged .gz is an OSError without an error number
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"cannot read {file}: it is cut short or damaged ({error})") from error


def _blocks(raw: BinaryIO, file: Path, *, advance: Advance) -> Iterator[bytes]:
    """Yield the unpacked contents in blocks of about 1 MiB."""
    done = num_unpacked = 0
    for block in _unpacked(raw, file, size=BLOCK_BYTES):
        advance(raw.tell() - done)
        done = raw.tell()
        num_unpacked += len(block)
        if num_unpacked > FREE_BYTES + MAX_GROWTH * done:
            raise DataError(
                f"{file} unpacks to over {MAX_GROWTH} times its size, as text does not: its first "
                f"{done / 1e6:.1f} MB gave {num_unpacked / 1e6:.0f} MB; look at what is in it, and "
                f"unpack it yourself if you want it read"
            )
        yield block


def _unpacked(raw: BinaryIO, file: Path, *, size: int) -> Iterator[bytes]:
    """Yield blocks of at least `size` bytes; the last one may be smaller."""
    kind = file.suffix.lower()
    if kind != ".zst":
        unpacked = gzip.GzipFile(fileobj=raw) if kind == ".gz" else raw
        while block := unpacked.read(size):
            yield block
        return
    parts: list[bytes] = []
    gathered = 0
    for part in _unpack_zst(raw):
        parts.append(part)
        gathered += len(part)
        if gathered >= size:
            yield b"".join(parts)
            parts, gathered = [], 0
    if parts:
        yield b"".join(parts)


def _unpack_zst(raw: BinaryIO) -> Iterator[bytes]:
    """Yield what each KiB unpacks to, at most 32 MiB at once."""
    import zstandard

    # not stream_reader: it reads a file that was cut short without an error
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    while packed := raw.read(PACKED_BYTES):
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
    """Return the text of `data` and how many bytes were used: a cut last character is left."""
    try:
        text, used = codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        unpacked = " of the unpacked text" if file.suffix.lower() in COMPRESSED else ""
        raise DataError(
            f"text must be UTF-8: {file}{place} has an invalid byte "
            f"0x{data[error.start]:02x} at byte offset {offset + error.start}{unpacked}; "
            f"convert the file, for example with iconv"
        ) from error
    # without a byte order mark
    return (text[1:] if offset == 0 and text.startswith("\ufeff") else text), used


def _text(blocks: Iterator[bytes], file: Path) -> Iterator[Piece]:
    data, text, offset = b"", "", 0
    for block in blocks:
        data += block
        more, used = _decode(data, file, offset=offset, final=False)
        data, offset, text = data[used:], offset + used, text + more
        # hold one character back: the last piece of a document must not be empty
        while len(text) > PIECE_CHARS:
            cut = cut_point(text, limit=PIECE_CHARS)
            yield Piece(text[:cut], ends_document=False)
            text = text[cut:]
    _decode(data, file, offset=offset, final=True)
    if text:
        yield Piece(text, ends_document=True)


def _lines(blocks: Iterator[bytes], file: Path) -> Iterator[bytes]:
    # the parts of a long line are joined once, at its end: joined at each block, they would be
    # copied as many times as there are blocks
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            start = b"".join(parts)[:HEAD_BYTES].decode(errors="replace").lstrip("\ufeff \t\r")
            what = ARRAY_ADVICE if start.startswith("[") else "cut it into documents"
            raise DataError(
                f"a line of {file} is longer than {MAX_LINE_BYTES >> 20} MiB, beginning with "
                f"{start[:40]!r}; {what}"
            )
        if others:
            yield b"".join(parts)
            *lines, last = others
            yield from lines
            parts, size = [last], len(last)
    if size:
        yield b"".join(parts)


def _numbered(blocks: Iterator[bytes], file: Path) -> Iterator[tuple[str, str]]:
    offset = 0
    for number, line in enumerate(_lines(blocks, file), start=1):
        place = f" line {number}"
        text, _ = _decode(line, file, offset=offset, final=True, place=place)
        offset += len(line) + 1
        if text.strip():
            yield text, f"{file}{place}"


def _json_lines(blocks: Iterator[bytes], file: Path, text_key: str) -> Iterator[Piece]:
    for line, where in _numbered(blocks, file):
        if document := _document(line, text_key, where=where):
            yield Piece(document, ends_document=True)


def _document(line: str, text_key: str, *, where: str) -> str:
    value = parse_line(line, where=where)
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a JSON object, got {type_name(value)}")
    if text_key not in value:
        got = f"keys {', '.join(map(repr, value))}" if value else "no keys"
        said = f"{where} must have text under the key {text_key!r}, got {got:.300}"
        if "messages" in value or {"prompt", "completion"} <= value.keys():
            raise DataError(f'{said}; chats and completions are for dataset = "examples"')
        raise WrongKeyError(said)
    text = value[text_key]
    if not isinstance(text, str):
        raise WrongKeyError(
            f"{where} must have text under the key {text_key!r}, got {type_name(text)}"
        )
    check_characters(text, where=where)
    return text

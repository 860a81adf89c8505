"""Text from files, read in pieces: a corpus is never held in memory.

A `Corpus` yields pieces of documents. A text file is one document, however long; so is each row of
a file of rows. Text must be UTF-8: an invalid byte is an error that names its place, since
replacing it would train on damaged text unnoticed. `formats.py` says how a file is read, `parts.py`
gets at its bytes, `rows.py` at its rows.

A corpus has an identity, made of what is cheap to know about its files (path, size, times): enough
to tell on this machine that they have not changed since they were tokenised. The built-in texts are
corpora too, in `builtin.py`.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.formats import TEXT, check_contents, format_of
from torchtitan.data.parts import (
    BLOCK_BYTES,
    HEAD_BYTES,
    Advance,
    Counted,
    Part,
    readable,
    unpacked,
)
from torchtitan.data.rows import RowText
from torchtitan.data.text import check_fetched, cut_point
from torchtitan.data.urls import copy_identity

logger = logging.getLogger(__name__)

PIECE_CHARS = 1 << 20


class Piece(NamedTuple):
    """A part of a document's text; pieces of a document follow one another."""

    text: str
    ends_document: bool
    where: str
    """What it was read from: a file, or a row of one."""


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

    files: Sequence[Path]

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
    """The text of files of any format: of rows what is under a key, or a template of keys.

    `settings`: what errors call `text_key` and `template`.
    """

    text_key: str
    template: str | None = None
    settings: tuple[str, str] = ("dataset_text_key", "dataset_text_template")

    def identity(self) -> list[str]:
        """Return path, size and times of each file, and the key of the text or the template."""
        template = [] if self.template is None else [self.template]
        return [*super().identity(), self.text_key, *template]

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Check that no file is binary, then yield the text of each."""
        check_heads(self.files)
        setting = self.settings[self.template is not None]
        text_of = RowText(self.text_key, self.template, setting=setting)
        for file in self.files:
            num_pieces = 0
            for part in open_parts(file, advance=advance):
                read = format_of(part.name).rows
                rows = () if read is None else read(part, text_of.keys)
                texts = ((text_of(row), row.where) for row in rows)
                documents = (Piece(text, True, where) for text, where in texts if text)
                for piece in _pieces(part) if read is None else documents:
                    num_pieces += 1
                    yield piece
            if not num_pieces:
                raise DataError(f"a data file must not be empty: {file} holds no text; remove it")


def file_identity(file: Path) -> str:
    """Return a string that changes when the file is written or replaced."""
    if (copy := copy_identity(file)) is not None:
        return copy
    status = file.stat()
    # with the change time, which also differs for a copy of equal size and modification time
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def check_heads(files: Sequence[Path]) -> None:
    """Raise DataError for the first file that is not what its name says.

    Of an archive only the first file in it is looked at. JSON Lines read as text are warned of.
    """
    in_lines = []
    for file in files:
        for part in islice(open_parts(file), 1):
            if format_of(part.name) is TEXT and _holds_lines(part.head()):
                in_lines.append(file)
    if in_lines:
        logger.warning(
            "%s in JSON Lines, as %s, will be read as plain text, with keys and brackets, because "
            "of the suffix; to train on the texts alone, rename to .jsonl",
            amount(len(in_lines), "file"),
            in_lines[0],
        )


def open_parts(file: Path, *, advance: Advance = lambda num_bytes: None) -> Iterator[Part]:
    """Yield the file, or the files in it; raise DataError for one that cannot be read."""
    how = format_of(file)
    with readable(file), BufferedReader(Counted(file, advance), BLOCK_BYTES) as raw:
        check_fetched(file, raw.peek(HEAD_BYTES)[:HEAD_BYTES])
        stream = unpacked(raw, file)
        inside = [("", stream)] if how.members is None else how.members(stream, file)
        for name, packed in inside:
            path = file / name.lstrip("/")
            contents = unpacked(packed, path) if name else packed
            part = Part(path, contents, is_packed=contents is not raw)
            inner = format_of(part.name)
            if name and (inner.members or not inner.is_streamed):
                raise DataError(f"{part.name}: {inner.name} is not read in an archive; unpack that")
            if inner.is_text:
                check_contents(part.name, part.head())
            yield part


def _holds_lines(head: bytes) -> bool:
    """Return whether text begins like JSON Lines: with a line that is an object."""
    line, end, _ = head.removeprefix(codecs.BOM_UTF8).partition(b"\n")
    return line.startswith(b'{"') and (not end or line.rstrip().endswith(b"}"))


def _pieces(part: Part) -> Iterator[Piece]:
    """Yield the pieces of one document."""
    text = ""
    for more in part.texts():
        text += more
        # hold one character back: the last piece of a document must not be empty
        while len(text) > PIECE_CHARS:
            cut = cut_point(text, limit=PIECE_CHARS)
            yield Piece(text[:cut], ends_document=False, where=str(part.name))
            text = text[cut:]
    if text:
        yield Piece(text, ends_document=True, where=str(part.name))

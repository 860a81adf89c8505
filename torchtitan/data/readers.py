"""Documents of data files, read in pieces: one reader per suffix.

A text file is one document; each row of JSON Lines, JSON, CSV, TSV, Parquet and Arrow is one. The
suffix decides which, because the content cannot: a CSV table is valid text. The first bytes are
checked too, so that a binary file under the name of a text file is refused. Text must be UTF-8: an
invalid byte is an error, because replacing it would train on damaged text.

A corpus may not fit in memory, so files are read and decompressed in blocks, a long document is
yielded in pieces, and a reader holds few rows at a time. Two limits bound the memory for any file:
the length of a line, and the ratio of compression (a few KiB can hold terabytes of one letter).

A mistake in one file is reported together with the first mistake of each file after it.

A reader checks only its own format. The values of a row are checked in one place for all formats:
text by `TextTemplate`, fine-tuning examples in `finetune/examples.py`. So the same rows give the
same tokens in every format. A new format is one function and one line of `READERS`.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import io
import json
import lzma
import os
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torchtitan.base.errors import DataError, Violation
from torchtitan.base.log import plural
from torchtitan.data.settings import template_parts
from torchtitan.data.store import STORE_SUFFIXES
from torchtitan.data.text import Piece, check_characters, check_fetched, cut_point

BLOCK_BYTES = 1 << 20
COMPRESSED_BYTES = 1 << 10
HEAD_BYTES = 4096
PIECE_CHARS = 1 << 20
ROWS_AT_ONCE = 256
MAX_LINE_BYTES = 1 << 28
# text compresses to a fifth, one letter to a thousandth; 4 bytes of zstd may hold 128 KiB
MAX_GROWTH, FREE_BYTES = 400, 1 << 26
# of files after the first one with a mistake: the user waits for what they cost
MAX_MISTAKES, MAX_CHECKED_BYTES = 10, 1 << 28
T = TypeVar("T")
U = TypeVar("U")

PROSE = "txt text md markdown mdx rst adoc org tex bib log tokens srt vtt html htm xml xhtml"
CONFIGS = "yaml yml toml ini cfg conf properties cmake mk make gradle dockerfile proto jinja"
SOURCES = (
    "py pyi pyx c h cc cpp cxx hh hpp hxx cu cuh m mm java kt kts scala groovy js jsx mjs cjs ts "
    "tsx vue svelte css scss less go rs rb php pl pm lua r jl swift sh bash zsh fish ps1 bat sql "
    "hs ml mli fs fsx cs vb ex exs erl hrl clj cljs lisp el scm rkt f f90 f95 for asm s v sv vhd "
    "vhdl dart zig nim d ada adb ads pas lean thy coq agda tcl awk sed diff patch graphql"
)
TEXT_SUFFIXES = {"", *(f".{name}" for name in f"{PROSE} {CONFIGS} {SOURCES}".split())}

Stream: TypeAlias = "BufferedReader[Any]"


class Row(NamedTuple):
    """The value of a row, and its position for messages, such as `a.jsonl line 3`."""

    value: object
    where: str


def read_documents(file: Path, *, text_of: TextTemplate) -> Iterator[Piece]:
    """Yield the documents of a file in order. Rows with empty text are skipped.

    Raises:
        DataError: The file cannot be read, or holds no text.
    """
    is_empty = True
    if suffix_of(file) in READERS:
        for row in read_rows(file, columns=text_of.keys):
            if text := text_of(row):
                is_empty = False
                yield Piece(text, ends_document=True, where=row.where)
    else:
        for piece in _read_text(file):
            is_empty = False
            yield piece
    if is_empty:
        raise DataError(f"a data file must not be empty: {file} holds no text; remove it")


def read_rows(file: Path, *, columns: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file in order. Columns that are not listed may be omitted."""
    with open_data_file(file) as data:
        yield from READERS[suffix_of(file)](data, columns)


def read_each(files: Sequence[Path], read: Callable[[Path], Iterable[T]]) -> Iterator[T]:
    """Check the start of all files, then yield what `read` returns for each.

    Raises:
        DataError: Files have mistakes. The error has the first mistake of each.
    """
    try:
        check_heads(files)
    except DataError as error:
        raise add_mistakes(error, files, read) from error
    for number, file in enumerate(files, start=1):
        try:
            yield from read(file)
        except DataError as error:
            raise add_mistakes(error, files[number:], read) from error


def add_mistakes(
    error: DataError, files: Sequence[Path], read: Callable[[Path], Iterable[object]]
) -> DataError:
    """Return `error` together with the first mistake of each of `files`.

    The last line is the number of files that were not checked, because there are `MAX_MISTAKES`
    mistakes or `MAX_CHECKED_BYTES` were read.
    """
    found, num_bytes = [error], 0
    for number, file in enumerate(files):
        num_bytes += file.stat().st_size if file.exists() else 0
        if len(found) >= MAX_MISTAKES or num_bytes > MAX_CHECKED_BYTES:
            unchecked = plural(len(files) - number, "file")
            return join_errors(found, more=f"not checked: {unchecked} from {file} on")
        try:
            deque(read(file), maxlen=0)
        except DataError as other:
            found.append(other)
    return join_errors(found)


def check_each(items: Iterable[U], check: Callable[[U], T]) -> list[T]:
    """Return what `check` returns for each item.

    Raises:
        DataError: The error has the first `MAX_MISTAKES` that `check` raised.
    """
    results: list[T] = []
    errors: list[DataError] = []
    for item in items:
        try:
            results.append(check(item))
        except DataError as error:
            errors.append(error)
    if errors:
        num_more = len(errors) - MAX_MISTAKES
        raise join_errors(
            errors[:MAX_MISTAKES], more=f"and {num_more} more" if num_more > 0 else ""
        )
    return results


def join_errors(errors: Sequence[DataError], *, more: str = "") -> DataError:
    """Return one error with the lines of all, each once, and `more`.

    It names their setting if all name the same.
    """
    problems = [error.problem for error in errors]
    keys = {problem.keys if isinstance(problem, Violation) else () for problem in problems}
    shared = keys.pop() if len(keys) == 1 else ()
    texts = [p.rule if shared and isinstance(p, Violation) else str(p) for p in problems]
    lines = dict.fromkeys(line for text in (*texts, more) for line in text.splitlines())
    text = "\n".join(lines)
    return DataError(Violation(shared, text) if shared else text)


def _read_text(file: Path) -> Iterator[Piece]:
    text = ""
    with open_data_file(file) as data:
        for block in data.texts():
            text += block
            # keep one character back: the last piece of a document must not be empty
            while len(text) > PIECE_CHARS:
                cut = cut_point(text, limit=PIECE_CHARS)
                yield Piece(text[:cut], ends_document=False, where=str(file))
                text = text[cut:]
        if text:
            yield Piece(text, ends_document=True, where=str(file))


class TextTemplate:
    """Takes the text out of rows: the value under a key, or several values put into a template.

    Args:
        key: Key that holds the text.
        template: Text with keys in braces, used instead of `key` if given.
        setting: Name of the key or template in error messages.
    """

    def __init__(self, key: str, template: str | None, *, setting: str) -> None:
        self._parts = [("", key)] if template is None else template_parts(template)
        self.keys = [key for _, key in self._parts if key is not None]
        self._setting = setting

    def __call__(self, row: Row) -> str:
        """Return the text of a row."""
        value, where = row
        if not isinstance(value, dict):
            raise DataError(f"{where} must be a JSON object, got {type_name(value)}")
        texts = []
        for literal, key in self._parts:
            texts += [literal, "" if key is None else self._value(key, value, where=where)]
        return "".join(texts)

    def _value(self, key: str, row: dict[str, object], *, where: str) -> str:
        value = row.get(key)
        if isinstance(value, str):
            check_characters(value, where=where)
            return value
        got = type_name(value)
        if key not in row:
            got = f"keys {', '.join(map(repr, row)) or 'none':.300}"
        raise DataError.at(
            self._setting, f"{where} must have text under the key {key!r}, got {got}"
        )


def type_name(value: object) -> str:
    """Return the name of a value's JSON type, and the value if it is short."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    shown = "" if value is None or isinstance(value, list | dict) else f", {value!r:.40}"
    return f"{names.get(type(value), type(value).__name__)}{shown}"


def suffix_of(file: Path) -> str:
    """Return the suffix that selects the reader, in lower case, without one of compression.

    A suffix with a space is part of the name.
    """
    inner = Path(file.stem) if file.suffix.lower() in DECOMPRESSORS else file
    return "" if " " in inner.suffix else inner.suffix.lower()


def check_suffix(file: Path) -> None:
    """Raise DataError if files of this suffix are not supported."""
    suffix = suffix_of(file)
    if suffix in BINARY_SUFFIXES:  # not compressed; the files of a store have exact names
        is_supported = suffix == (file.suffix if suffix in STORE_SUFFIXES else file.suffix.lower())
    else:
        is_supported = suffix in READERS or suffix in TEXT_SUFFIXES
    if not is_supported:
        raise DataError(
            f"{file} has the unsupported suffix {suffix!r}; supported are text (.txt, .md, source "
            f"code, no suffix), {', '.join(READERS)}, {' and '.join(STORE_SUFFIXES)} (in lower "
            f"case), and text compressed as {', '.join(DECOMPRESSORS)}"
        )


def check_heads(files: Sequence[Path]) -> None:
    """Raise DataError for the first file whose content does not fit its suffix."""
    for file in files:
        with open_data_file(file):
            pass


@dataclass(frozen=True)
class DataFile:
    """An open data file."""

    path: Path
    stream: Stream
    """The content, decompressed."""

    def head(self) -> bytes:
        """Return the first bytes of the content. Valid before anything was read."""
        return self.stream.peek(HEAD_BYTES)[:HEAD_BYTES]

    def texts(self) -> Iterator[str]:
        """Yield the text in blocks of about 1 MiB."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        is_last = False
        while not is_last:
            block = self.stream.read(BLOCK_BYTES)
            is_last = not block
            with _require_utf8(self.path):
                text = decoder.decode(block, final=is_last)
            yield text

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield number and text of each line, with its end."""
        for number in count(1):
            line = self.stream.readline(MAX_LINE_BYTES + 1)
            where = f"{self.path} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{where} must have at most {MAX_LINE_BYTES >> 20} MiB")
            if not line:
                return
            with _require_utf8(where):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            yield number, text


@contextmanager
def _require_utf8(where: object) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        near = error.object[max(error.start - 20, 0) : error.end + 20]
        raise DataError(
            f"text must be UTF-8: {where} has an invalid byte 0x{error.object[error.start]:02x} "
            f"in {near!r}; convert the file, for example with iconv"
        ) from error


@contextmanager
def open_data_file(file: Path) -> Iterator[DataFile]:
    """Open a file, decompressed by its suffix, and check its first bytes.

    Raises:
        DataError: The file is missing, damaged, or not of the format that its suffix names. Raised
            inside the context too, while the file is read.
    """
    with _as_data_error(file), BufferedReader(io.FileIO(file), BLOCK_BYTES) as stream:
        check_fetched(file, stream.peek(HEAD_BYTES)[:HEAD_BYTES])
        data = DataFile(file, stream)
        decompress = DECOMPRESSORS.get(file.suffix.lower())
        if decompress is not None:
            blocks = _limit_growth(decompress(stream), compressed=stream, file=file)
            data = DataFile(file, BufferedReader(_BlockStream(blocks), BLOCK_BYTES))
        if suffix_of(file) not in BINARY_SUFFIXES:
            head = data.head()
            check_fetched(file, head)
            if b"\0" in head:
                raise DataError(
                    f"text must be UTF-8 without zero bytes, {file} has one at byte offset "
                    f"{head.index(0)}; remove binary files, convert UTF-16 with iconv"
                )
        yield data


@contextmanager
def _as_data_error(file: Path) -> Iterator[None]:
    """Turn what libraries raise on a missing or damaged file into a DataError."""
    try:
        yield
    except OSError as error:
        # a damaged .bz2 is an OSError without an error number
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {file}: it is cut short or damaged ({error})") from error


class _BlockStream(io.RawIOBase):
    """Blocks of any size as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _limit_growth(blocks: Iterator[bytes], *, compressed: Stream, file: Path) -> Iterator[bytes]:
    """Yield decompressed blocks; raise DataError if they grow more than text can."""
    size = 0
    for block in blocks:
        size += len(block)
        if size > FREE_BYTES + MAX_GROWTH * compressed.tell():
            raise DataError(
                f"{file} decompresses to over {MAX_GROWTH} times its size, which text does not: "
                f"its first {compressed.tell() / 1e6:.1f} MB gave {size / 1e6:.0f} MB; to read it, "
                f"decompress it first"
            )
        yield block


def _decompress(compressed: Stream, *, new: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of each KiB, at most 32 MiB at once. A file may hold several streams.

    The file objects of `bz2`, `lzma` and `zstandard` are not used: they end without an error where
    a stream is cut short, or where the start of a further stream is damaged.
    """
    stream = None
    while data := compressed.read(COMPRESSED_BYTES):
        while data:
            stream = stream or new()
            if block := stream.decompress(data):
                yield block
            data = b""
            if stream.eof:
                data, stream = stream.unused_data, None
    if stream is not None:
        raise EOFError("its last stream has no end")


def _decompress_zst(compressed: Stream) -> Iterator[bytes]:
    import zstandard

    new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
    try:
        yield from _decompress(compressed, new=new)
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error


DECOMPRESSORS: Mapping[str, Callable[[Stream], Iterator[bytes]]] = {
    ".gz": partial(_decompress, new=partial(zlib.decompressobj, wbits=31)),
    ".bz2": partial(_decompress, new=bz2.BZ2Decompressor),
    ".xz": partial(_decompress, new=lzma.LZMADecompressor),
    ".zst": _decompress_zst,
}


def read_json_lines(data: DataFile, columns: Collection[str]) -> Iterator[Row]:
    """Yield the value of each line that is not blank."""
    for number, line in data.lines():
        if line.strip():
            where = f"{data.path} line {number}"
            yield Row(
                _parse_json(line.rstrip("\r\n"), rule=f"{where} must be one JSON object"), where
            )


def _parse_json(text: str, *, rule: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{rule}: {error}") from error


def read_json(data: DataFile, columns: Collection[str]) -> Iterator[Row]:
    """Yield the items of an array. A file that does not start with one holds JSON Lines."""
    if not data.head().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from read_json_lines(data, columns)
        return
    text = io.StringIO()
    for block in data.texts():
        text.write(block)
        if text.tell() > MAX_LINE_BYTES:
            limit = f"at most {MAX_LINE_BYTES >> 20} MiB"
            raise DataError(f"a JSON array must have {limit}, {data.path} has more; use .jsonl")
    values = _parse_json(text.getvalue(), rule=f"{data.path} must be one JSON array")
    for number, value in enumerate(values, start=1):
        yield Row(value, f"{data.path} item {number}")


def read_table(data: DataFile, columns: Collection[str], *, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first row names the columns. Each value is text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    names: list[str] = []
    first_line = 1

    def lines() -> Iterator[str]:
        row_size = 0
        for number, line in data.lines():
            # quotes may join any number of lines
            row_size = len(line) + (row_size if number > first_line else 0)
            if row_size > MAX_LINE_BYTES:
                limit = f"at most {MAX_LINE_BYTES >> 20} MiB"
                raise DataError(f"the row at {data.path} line {first_line} must have {limit}")
            yield line

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        where = f"{data.path} line {first_line}"
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            # without Python's advice to programmers, after a dash
            reason = str(error).partition(" - ")[0]
            rule = f"must be a row of {delimiter!r}-separated values"
            raise DataError(f"{where} {rule}: {reason}") from error
        first_line = rows.line_num + 1
        if not names:
            names = _check_unique(values, where=where)
        elif values and len(values) != len(names):
            raise DataError(
                f"{where} must have {len(names)} values, like the first row, got {len(values)}"
            )
        elif values:
            yield Row(dict(zip(names, values, strict=True)), where)


def read_parquet(data: DataFile, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    _import_pyarrow(data.path)
    import pyarrow.parquet as parquet

    def batches() -> Iterator[Any]:
        # opened by its path and without pre_buffer, a row group is read when it is used
        with parquet.ParquetFile(data.path, pre_buffer=False) as file:
            selected = _select(file.schema_arrow.names, columns, file=data.path)
            longest = _check_growth(file.metadata, selected, file=data.path)
            at_once = max(1, min(ROWS_AT_ONCE, MAX_LINE_BYTES // longest))
            yield from file.iter_batches(at_once, columns=selected)

    return _rows_of_batches(batches(), file=data.path, columns=columns)


def _check_growth(metadata: Any, columns: Collection[str], *, file: Path) -> int:
    """Return an upper bound of the bytes of a value in these columns.

    All rows of a group may share one long value. Raises DataError if a group grows more than text
    can.
    """
    longest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        chunks = [c for c in chunks if c.path_in_schema.partition(".")[0] in columns]
        size = sum(c.total_uncompressed_size for c in chunks)
        if size > FREE_BYTES + MAX_GROWTH * sum(c.total_compressed_size for c in chunks):
            raise DataError(
                f"{file} decompresses to over {MAX_GROWTH} times its size, which text does not: "
                f"row group {number} to {size / 1e6:.0f} MB; to read it, write it as .jsonl"
            )
        longest = max(longest, size)
    return longest


def read_arrow(data: DataFile, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of an Arrow file, or of an Arrow stream, which `datasets` writes."""
    pyarrow = _import_pyarrow(data.path)

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(data.path)) as source:
            if data.head().startswith(b"ARROW1"):
                file = pyarrow.ipc.open_file(source)
                yield from map(file.get_batch, range(file.num_record_batches))
                return
            yield from pyarrow.ipc.open_stream(source)
        data.stream.seek(-4, os.SEEK_END)
        if any(data.stream.read()):  # pyarrow does not check the end mark, 4 zero bytes
            raise EOFError("the stream has no end")

    return _rows_of_batches(batches(), file=data.path, columns=columns)


def _import_pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"reading {file} needs the package 'pyarrow'; "
            f"install it, in the repository, with: pip install -e '.[data]'"
        ) from error
    return pyarrow


def _rows_of_batches(
    batches: Iterator[Any], *, file: Path, columns: Collection[str]
) -> Iterator[Row]:
    """Yield the rows of Arrow record batches that are read from `file`."""
    import pyarrow

    number = 0
    try:
        for batch in batches:
            selected = batch.select(_select(batch.schema.names, columns, file=file))
            for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                rows = selected.slice(first, ROWS_AT_ONCE)
                rows.validate(full=True)
                # one row at a time: conversion copies a long value that rows share
                for values in zip(*rows.columns, strict=True):
                    number += 1
                    pairs = zip(rows.schema.names, values, strict=True)
                    value = {name: _without_nulls(item.as_py()) for name, item in pairs}
                    yield Row(value, f"{file} row {number}")
    # ValueError, OverflowError: values without a Python type, such as nanoseconds
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(
            f"cannot read {file} after row {number}: it is cut short or damaged, or has "
            f"values of an unknown type ({error!s:.200})"
        ) from error


def _select(names: Sequence[str], columns: Collection[str], *, file: Path) -> list[str]:
    """Return the columns to read: all if one is missing, so that an error can list them."""
    _check_unique(names, where=str(file))
    return [*(columns if columns and set(columns) <= set(names) else names)]


def _check_unique(names: Sequence[str], *, where: str) -> list[str]:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{where} must name each column once, got {repeated[0]!r} twice")
    return [*names]


def _without_nulls(value: object) -> object:
    # a struct of Arrow has every key of its type; chat templates expect missing keys
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


Reader = Callable[[DataFile, Collection[str]], Iterator[Row]]
"""Yields the rows of a file. Columns that are not listed may be omitted, if any are listed."""

READERS: Mapping[str, Reader] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": partial(read_table, delimiter=","),
    ".tsv": partial(read_table, delimiter="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
BINARY_SUFFIXES = {".parquet", ".arrow", ".feather", *STORE_SUFFIXES}

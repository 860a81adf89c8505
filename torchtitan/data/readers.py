"""Documents of data files: a text file is one, each row of a table or of JSON Lines is one.

The suffix decides the format, because the content cannot: a CSV table is valid text. Text must be
UTF-8: replacing an invalid byte would train on damaged text. Files are read in blocks, since a
corpus may not fit in memory. A reader checks only its own format; the values of a row are checked
in one place for all formats, so the same rows give the same tokens in each.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from torchtitan.base.errors import DataError, Violation
from torchtitan.data.settings import template_parts
from torchtitan.data.store import STORE_SUFFIXES
from torchtitan.data.text import Piece, check_characters, check_fetched

BLOCK_BYTES = BLOCK_CHARS = 1 << 20
HEAD_BYTES = 4096
ROWS_AT_ONCE = 256
MAX_MISTAKES = 10
CHECKED_FILES, CHECKED_ROWS = 1000, 1000
"""Files that are checked after a mistake in another one, and rows of each."""
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
COMPRESSED = (".gz", ".zst")


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
        with open_data_file(file) as data:
            text_file = io.TextIOWrapper(data, encoding="utf-8-sig", newline="\n")
            text = text_file.read(BLOCK_CHARS)
            while text:
                is_empty, following = False, text_file.read(BLOCK_CHARS)
                yield Piece(text, ends_document=not following, where=str(file))
                text = following
    if is_empty:
        raise DataError(f"a data file must not be empty: {file} holds no text; remove it")


def read_rows(file: Path, *, columns: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file in order. Columns that are not listed may be omitted."""
    with open_data_file(file) as data:
        yield from READERS[suffix_of(file)](data, file, columns)


def read_each(files: Sequence[Path], read: Callable[[Path], Iterable[T]]) -> Iterator[T]:
    """Check the start of all files, then yield what `read` returns for each.

    Raises:
        DataError: Files have mistakes. The error has the first one of each; see `find_mistakes`.
    """
    try:
        for_each(files, check_start)
    except DataError as error:
        raise join_errors([error, *find_mistakes(files, read)]) from error
    for number, file in enumerate(files, start=1):
        try:
            yield from read(file)
        except DataError as error:
            raise join_errors([error, *find_mistakes(files[number:], read)]) from error


def find_mistakes(
    files: Sequence[Path], read: Callable[[Path], Iterable[object]]
) -> list[DataError]:
    """Return the first mistake of each file, among the first rows of the first files."""
    mistakes: list[DataError] = []
    for file in files[:CHECKED_FILES]:
        try:
            for _ in islice(read(file), CHECKED_ROWS):
                pass
        except DataError as error:
            mistakes.append(error)
        if len(mistakes) == MAX_MISTAKES:
            break
    return mistakes


def for_each(items: Iterable[U], function: Callable[[U], T]) -> list[T]:
    """Return what `function` returns for each item; raise the DataErrors of all items together."""
    results: list[T] = []
    mistakes: list[DataError] = []
    for item in items:
        try:
            results.append(function(item))
        except DataError as error:
            mistakes.append(error)
    if mistakes:
        raise join_errors(mistakes)
    return results


def join_errors(errors: Sequence[DataError]) -> DataError:
    """Return one error with the first `MAX_MISTAKES`. It names their setting if all have the same.

    A line that several errors share appears once.
    """
    problems = [error.problem for error in errors[:MAX_MISTAKES]]
    keys = {problem.keys if isinstance(problem, Violation) else () for problem in problems}
    shared = keys.pop() if len(keys) == 1 else ()
    texts = [p.rule if shared and isinstance(p, Violation) else str(p) for p in problems]
    if len(errors) > MAX_MISTAKES:
        texts.append(f"and {len(errors) - MAX_MISTAKES} more")
    text = "\n".join(dict.fromkeys(line for text in texts for line in text.splitlines()))
    return DataError(Violation(shared, text) if shared else text)


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
        got = type_name(value) if key in row else f"keys {', '.join(map(repr, row)) or 'none':.300}"
        rule = f"{where} must have text under the key {key!r}, got {got}"
        raise DataError.at(self._setting, rule)


def type_name(value: object) -> str:
    """Return the name of a value's JSON type, and the value if it is short."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    text = "" if value is None or isinstance(value, list | dict) else f", {value!r:.40}"
    return f"{names.get(type(value), type(value).__name__)}{text}"


def suffix_of(file: Path) -> str:
    """Return the suffix that selects the reader, in lower case, without one of compression.

    A suffix with a space is part of the name.
    """
    inner = Path(file.stem) if file.suffix.lower() in COMPRESSED else file
    return "" if " " in inner.suffix else inner.suffix.lower()


def check_suffix(file: Path) -> None:
    """Raise DataError if files of this suffix are not supported."""
    suffix = suffix_of(file)
    is_whole = suffix == file.suffix.lower()  # binary formats have a compression of their own
    if suffix in STORE_SUFFIXES and suffix == file.suffix:
        return
    if suffix not in {*READERS, *TEXT_SUFFIXES} or (suffix in BINARY_SUFFIXES and not is_whole):
        raise DataError(
            f"{file} has the unsupported suffix {suffix!r}; supported are text (.txt, .md, source "
            f"code, no suffix), {', '.join(READERS)}, {' and '.join(STORE_SUFFIXES)}, and text "
            f"compressed as {' or '.join(COMPRESSED)}"
        )


def check_start(file: Path) -> None:
    """Raise DataError if the first bytes of a file do not fit its suffix."""
    with open_data_file(file):
        pass


@contextmanager
def open_data_file(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed by its suffix, and check its first bytes.

    Raises:
        DataError: The file is missing, damaged, or not of the format that its suffix names. Raised
            inside the context too, while the file is read.
    """
    try:
        with file.open("rb") as raw:
            check_fetched(file, raw.read(HEAD_BYTES))
            raw.seek(0)
            with io.BufferedReader(_decompress(raw, file), BLOCK_BYTES) as data:  # type: ignore[type-var]
                if suffix_of(file) not in BINARY_SUFFIXES:
                    head = data.peek(HEAD_BYTES)[:HEAD_BYTES]
                    check_fetched(file, head)
                    if b"\0" in head:
                        raise DataError(
                            f"text must be UTF-8 without zero bytes, {file} has one at byte offset "
                            f"{head.index(0)}; remove binary files, convert UTF-16 with iconv"
                        )
                yield data
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where=file) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"cannot read {file}: {reason or error}") from error


def _decompress(raw: BinaryIO, file: Path) -> Any:
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".zst":
        return _import_pyarrow(file).CompressedInputStream(raw, "zstd")
    return raw


def _not_utf8(error: UnicodeDecodeError, *, where: object) -> DataError:
    near = error.object[max(error.start - 20, 0) : error.end + 20]
    return DataError(
        f"text must be UTF-8: {where} has an invalid byte 0x{error.object[error.start]:02x} in "
        f"{near!r} ({error.reason}); convert the file, for example with iconv"
    )


def _lines(data: BinaryIO, file: Path) -> Iterator[tuple[str, str]]:
    """Yield the position and the text of each line, with its end."""
    for number, line in enumerate(data, start=1):
        where = f"{file} line {number}"
        try:
            yield where, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(error, where=where) from error


def read_json_lines(data: BinaryIO, file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield the value of each line that is not blank."""
    for where, line in _lines(data, file):
        if line.strip():
            yield Row(
                _parse_json(line.rstrip("\r\n"), rule=f"{where} must be a JSON object"), where
            )


def _parse_json(text: str, *, rule: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{rule}: {error}") from error


def read_json(data: io.BufferedReader, file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield the items of an array. A file that does not start with one holds JSON Lines."""
    if not data.peek(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from read_json_lines(data, file, columns)
        return
    values = _parse_json(data.read().decode("utf-8-sig"), rule=f"{file} must be one JSON array")
    for number, value in enumerate(values, start=1):
        yield Row(value, f"{file} item {number}")


def read_csv(data: BinaryIO, file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of a table, whose first row names the columns. Each value is text."""
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader((line for _, line in _lines(data, file)), strict=True)
    names: list[str] = []
    while True:
        where = f"{file} line {rows.line_num + 1}"
        try:
            values = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{where} must be a row of comma-separated values: {error}") from error
        if values is None:
            return
        if not names:
            names = values
            if len({*names}) < len(names):
                raise DataError(f"{where} must name each column once, got {names}")
        elif values and len(values) != len(names):
            raise DataError(
                f"{where} must have {len(names)} values, like the first row, got {len(values)}"
            )
        elif values:
            yield Row(dict(zip(names, values, strict=True)), where)


def read_parquet(data: BinaryIO, file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    _import_pyarrow(file)
    import pyarrow.parquet as parquet

    def batches() -> Iterator[Any]:
        # opened by its path and without pre_buffer, pages are read when they are used
        table = parquet.ParquetFile(file, pre_buffer=False)
        yield from table.iter_batches(
            ROWS_AT_ONCE, columns=_select(table.schema_arrow.names, columns)
        )

    return _rows_of_batches(batches(), file, columns)


def read_arrow(data: io.BufferedReader, file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of an Arrow file, or of an Arrow stream, which `datasets` writes."""
    pyarrow = _import_pyarrow(file)

    def batches() -> Iterator[Any]:
        if data.peek(6).startswith(b"ARROW1"):
            table = pyarrow.ipc.open_file(data)
            yield from map(table.get_batch, range(table.num_record_batches))
            return
        yield from pyarrow.ipc.open_stream(data)
        data.seek(-4, os.SEEK_END)
        if any(data.read()):  # pyarrow does not check the end mark, 4 zero bytes
            raise EOFError("the stream has no end")

    return _rows_of_batches(batches(), file, columns)


def _import_pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"reading {file} needs the package 'pyarrow'; "
            f"install it, in the repository, with: pip install -e '.[data]'"
        ) from error
    return pyarrow


def _rows_of_batches(batches: Iterator[Any], file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of Arrow record batches that are read from `file`."""
    import pyarrow

    number = 0
    try:
        for batch in batches:
            selected = batch.select(_select(batch.schema.names, columns))
            for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                rows = selected.slice(first, ROWS_AT_ONCE)
                rows.validate(full=True)
                for value in rows.to_pylist():
                    number += 1
                    yield Row(_without_nulls(value), f"{file} row {number}")
    # ValueError, OverflowError: values without a Python type, such as nanoseconds
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(
            f"cannot read {file} after row {number}: it is cut short or damaged, or has "
            f"values of an unknown type ({error!s:.200})"
        ) from error


def _select(names: Sequence[str], columns: Collection[str]) -> list[str]:
    """Return the columns to read: all if one is missing, so that an error can list them."""
    return [*(columns if columns and set(columns) <= set(names) else names)]


def _without_nulls(value: object, *, is_row: bool = True) -> object:
    # a struct of Arrow has every key of its type; chat templates expect missing keys
    if isinstance(value, dict):
        items = ((key, _without_nulls(item, is_row=False)) for key, item in value.items())
        return {key: item for key, item in items if is_row or item is not None}
    return (
        [_without_nulls(item, is_row=False) for item in value] if isinstance(value, list) else value
    )


Reader = Callable[[Any, Path, Collection[str]], Iterator[Row]]
"""Yields the rows of an open file. Columns that are not listed may be omitted, if any are."""

READERS: Mapping[str, Reader] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
BINARY_SUFFIXES = {".parquet", ".arrow", *STORE_SUFFIXES}

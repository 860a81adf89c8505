"""Documents of data files: a text file is one, each row of a table or of JSON Lines is one.

The suffix decides the format, because the content cannot: a CSV table is valid text. A file of any
other suffix is text, which must be UTF-8: replacing an invalid byte would train on damaged text.
Text, lines and tables are read in blocks, since a corpus may not fit in memory.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.base.errors import DataError, Violation
from torchtitan.data.settings import template_parts
from torchtitan.data.text import Piece, check_characters, check_fetched

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = BLOCK_CHARS = 1 << 20
HEAD_BYTES = 4096
ROWS_AT_ONCE = 256
MAX_MISTAKES = 10
DAMAGE = (EOFError, zlib.error, csv.Error, ValueError, RecursionError, OverflowError)
"""What reading raises for a damaged file. ValueError: of UTF-8, JSON and pyarrow."""
UNREADABLE = (OSError, ImportError, *DAMAGE)
Numbered = Iterator[tuple[int, object]]


class Row(NamedTuple):
    """The value of a row, and its position for messages, such as `a.jsonl line 3`."""

    value: object
    where: str


def read_documents(file: Path, *, text_of: TextTemplate) -> Iterator[Piece]:
    """Yield the documents of a file in order. Rows with empty text are skipped. Raises DataError if
    the file cannot be read, or holds no text."""
    is_empty = True
    if suffix_of(file) in READERS:
        for row in read_rows(file, columns=text_of.keys):
            if text := text_of(row):
                is_empty = False
                yield Piece(text, ends_document=True, where=row.where)
    else:
        for text, is_last in _read_text(file):
            is_empty = False
            yield Piece(text, ends_document=is_last, where=str(file))
    if is_empty:
        raise DataError(f"a data file must not be empty: {file} holds no text; remove it")


def read_rows(file: Path, *, columns: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file in order. Columns that are not listed may be omitted."""
    if suffix_of(file) not in READERS:
        raise DataError(f"{file} must hold rows, in one of the formats {', '.join(READERS)}")
    unit, read = READERS[suffix_of(file)]
    number = 0
    try:
        with open_data_file(file) as data:
            for number, value in read(data, file, columns):
                yield Row(value, f"{file} {unit} {number}")
    except UNREADABLE as error:
        after = f" after {unit} {number}" if number else ""
        raise DataError(f"cannot read {file}{after}: {error!s:.200}") from error


def _read_text(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield the blocks of a text file, and whether each is the last one."""
    try:
        with open_data_file(file) as data:
            text_file = io.TextIOWrapper(data, encoding="utf-8-sig", newline="\n")
            text = text_file.read(BLOCK_CHARS)
            if "\0" in text:
                raise ValueError("text must be UTF-8 without zero bytes")
            while text:
                following = text_file.read(BLOCK_CHARS)
                yield text, not following
                text = following
    except UNREADABLE as error:
        raise DataError(f"cannot read {file}: {error}") from error


@contextmanager
def open_data_file(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed by its suffix. Damage raises one of `UNREADABLE`."""
    with file.open("rb") as raw:
        check_fetched(file, raw.read(HEAD_BYTES))
        raw.seek(0)
        data: Any = raw
        if file.suffix.lower() == ".gz":
            data = gzip.GzipFile(fileobj=raw)
        elif file.suffix.lower() == ".zst":
            import pyarrow

            data = pyarrow.CompressedInputStream(raw, "zstd")
        with io.BufferedReader(data, BLOCK_BYTES) as reader:
            yield reader


def find_mistakes(
    files: Sequence[Path], read: Callable[[Path], Iterator[object]]
) -> list[DataError]:
    """Return the mistakes at the start of files, before the long work."""
    mistakes: list[DataError] = []
    for file in files:
        try:
            next(iter(read(file)), None)
        except DataError as error:
            mistakes.append(error)
        if len(mistakes) == MAX_MISTAKES:
            break
    return mistakes


def join_errors(errors: Sequence[DataError]) -> DataError:
    """Return one error with the first of each kind, under the setting of the first one."""
    problems = [error.problem for error in errors]
    groups: dict[str, list[str]] = {}
    for rule in dict.fromkeys(p.rule if isinstance(p, Violation) else p for p in problems):
        groups.setdefault(re.sub(r"\bline \d+", "line", rule), []).append(rule)
    lines = [
        f"{rule} (and {len(like_it)} more)" if like_it else rule
        for rule, *like_it in groups.values()
    ]
    dots = ["..."] if len(lines) > MAX_MISTAKES else []
    text, first = "\n".join(lines[:MAX_MISTAKES] + dots), problems[0]
    return DataError(replace(first, rule=text) if isinstance(first, Violation) else text)


@dataclass(frozen=True)
class TextTemplate:
    """Takes the text out of rows: the value under a key, or several values put into a template."""

    key: str
    template: str | None = None
    """Text with keys in braces, used instead of `key` if given."""

    @cached_property
    def parts(self) -> list[tuple[str, str | None]]:
        """Pairs of literal text and the key that follows it."""
        return [("", self.key)] if self.template is None else template_parts(self.template)

    @property
    def keys(self) -> list[str]:
        """Keys that rows must have."""
        return [key for _, key in self.parts if key is not None]

    def __call__(self, row: Row) -> str:
        """Return the text of a row."""
        value, where = row
        if not isinstance(value, dict):
            raise DataError(f"{where} must be a JSON object, got {value!r:.100}")
        for key in self.keys:
            text = value.get(key)
            if not isinstance(text, str):
                got = repr(text) if key in value else f"keys {', '.join(map(repr, value))}"
                rule = f"{where} must have text under the key {key!r}, got {got:.300}"
                setting = "dataset_text_template" if self.template else "dataset_text_key"
                raise DataError.at(setting, rule)
            check_characters(text, where=where)
        return "".join(literal + (value[key] if key else "") for literal, key in self.parts)


def suffix_of(file: Path) -> str:
    """Return the suffix that selects the reader, in lower case, without one of compression."""
    inner = Path(file.stem) if file.suffix.lower() in (".gz", ".zst") else file
    return inner.suffix.lower()


def read_json_lines(data: io.BufferedReader, file: Path, columns: Collection[str]) -> Numbered:
    """Yield the value of each line that is not blank. That of a broken line is a text, which
    no reader of rows accepts, so that the lines after it can be read."""
    for number, line in enumerate(data, start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                value = f"no JSON: {error}"
                if isinstance(error, json.JSONDecodeError):  # whose line is 1
                    value = f"no JSON: {error.msg} at column {error.colno}"
            yield number, value


def read_json(data: io.BufferedReader, file: Path, columns: Collection[str]) -> Numbered:
    """Yield the items of an array. A file that does not start with one holds JSON Lines."""
    if data.peek(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from enumerate(json.loads(data.read()), start=1)
    else:
        yield from read_json_lines(data, file, columns)


def read_csv(data: io.BufferedReader, file: Path, columns: Collection[str]) -> Numbered:
    """Yield the rows of a table, whose first row names the columns. Each value is text."""
    csv.field_size_limit(2**31 - 1)
    rows = csv.DictReader(io.TextIOWrapper(data, "utf-8-sig", newline=""), strict=True)
    names = rows.fieldnames or []
    if len({*names}) < len(names):
        raise ValueError(f"the first row must name each column once, got {names}")
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"a row must have a value for each of {rows.fieldnames}")
        yield rows.line_num, row


def read_table(data: io.BufferedReader, file: Path, columns: Collection[str]) -> Numbered:
    """Yield the rows of a Parquet file, an Arrow file, or an Arrow stream as `datasets` writes."""
    import pyarrow

    number = 0
    try:
        for batch in _read_batches(data, file, columns):
            for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                rows = batch.slice(first, ROWS_AT_ONCE)
                rows.validate(full=True)  # wrong offsets would read other memory
                for value in rows.to_pylist():
                    number += 1
                    yield number, _without_nulls(value)
    except pyarrow.ArrowException as error:
        raise ValueError(error) from error


def _read_batches(
    data: io.BufferedReader, file: Path, columns: Collection[str]
) -> Iterator[pyarrow.RecordBatch]:
    from pyarrow import ipc, parquet

    def select(names: list[str]) -> list[str]:
        # all if one is missing, so that an error can list them
        return [*(columns if columns and set(columns) <= set(names) else names)]

    if suffix_of(file) == ".parquet":
        # opened by its path and without pre_buffer, pages are read when they are used
        table = parquet.ParquetFile(file, pre_buffer=False)
        selected = select(table.schema_arrow.names)
        yield from table.iter_batches(ROWS_AT_ONCE, columns=selected)
        return
    if data.peek(6).startswith(b"ARROW1"):
        opened = ipc.open_file(data)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    else:
        batches = opened = ipc.open_stream(data)
    yield from (batch.select(select(opened.schema.names)) for batch in batches)
    if batches is opened:  # a stream, which ends with a length of 0
        data.seek(-4, os.SEEK_END)
        if any(data.read()):
            raise EOFError("the stream has no end")


def _without_nulls(value: object, *, is_row: bool = True) -> object:
    # a struct of Arrow has every key of its type; chat templates expect missing keys
    if isinstance(value, dict):
        items = ((key, _without_nulls(item, is_row=False)) for key, item in value.items())
        return {key: item for key, item in items if is_row or item is not None}
    if isinstance(value, list):
        return [_without_nulls(item, is_row=False) for item in value]
    return value


READERS: Mapping[str, tuple[str, Callable[[Any, Path, Collection[str]], Numbered]]] = {
    ".jsonl": ("line", read_json_lines),
    ".ndjson": ("line", read_json_lines),
    ".json": ("item", read_json),
    ".csv": ("line", read_csv),
    ".parquet": ("row", read_table),
    ".arrow": ("row", read_table),
}
"""What a row is called, and what yields the rows of an open file with their numbers."""

"""Files of rows: one reader for each format, and the text of a row.

A reader yields the rows of a file in order, each with its place for messages, and never holds more
than a few of them. It checks what its format alone can tell. What a row must hold is checked once
for all formats: a text here, an example to fine-tune on in `sft/examples.py`. So the same rows give
the same tokens in any format.

A reader may leave out columns that are not in `wanted`; without any it yields all.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torchtitan.base.errors import DataError
from torchtitan.data.parts import MAX_LINE_BYTES, Part, readable
from torchtitan.data.settings import template_parts
from torchtitan.data.text import check_characters

ARRAY_ADVICE = (
    "JSON Lines have one object per line; give an array the suffix .json, or convert it: "
    "jq -c '.[]' old.json > new.jsonl"
)
ROWS_AT_ONCE = 256
WHITE = " \t\r\n"
# where an item that is cut off may be found wrong: a number, a word or an escape at its end
CUT_CHARS = 16
STREAM_END = b"\0\0\0\0"


class Row(NamedTuple):
    """The value of a row, an object where all is well, and its file and number for messages."""

    value: object
    where: str


Reader = Callable[[Part, Collection[str]], Iterator[Row]]


class WrongKeyError(DataError):
    """A row without text under a key."""


class RowText:
    """Takes the text out of rows: what is under a key, or the template with its keys filled in."""

    def __init__(self, key: str, template: str | None) -> None:
        self._parts = [("", key)] if template is None else template_parts(template)
        self.keys = [key for _, key in self._parts if key is not None]

    def __call__(self, row: Row) -> str:
        """Return the text of a row, or raise DataError."""
        value, where = row
        if not isinstance(value, dict):
            raise DataError(f"{where} must be a JSON object, got {type_name(value)}")
        return "".join(
            literal + ("" if key is None else _text_under(key, value, where=where))
            for literal, key in self._parts
        )


def _text_under(key: str, value: dict[str, object], *, where: str) -> str:
    if key not in value:
        got = f"keys {', '.join(map(repr, value))}" if value else "no keys"
        said = f"{where} must have text under the key {key!r}, got {got:.300}"
        if "messages" in value or {"prompt", "completion"} <= value.keys():
            raise DataError(f'{said}; chats and completions are for dataset = "examples"')
        raise WrongKeyError(said)
    text = value[key]
    if not isinstance(text, str):
        raise WrongKeyError(f"{where} must have text under the key {key!r}, got {type_name(text)}")
    check_characters(text, where=where)
    return text


def type_name(value: object) -> str:
    """Return the name of a value's JSON type, and the value if it is short."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    shown = "" if value is None or isinstance(value, list | dict) else f", {value!r:.40}"
    return f"{names.get(type(value), type(value).__name__)}{shown}"


def read_json_lines(part: Part, wanted: Collection[str]) -> Iterator[Row]:
    """Yield the value of each line that is not blank."""
    for number, line in _lines(part):
        if line.strip():
            where = f"{part.name} line {number}"
            yield Row(_parse_line(line, where=where), where)


def _lines(part: Part) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line."""
    offset = 0
    for number, line in enumerate(part.lines(), start=1):
        text, _ = part.decode(line, offset=offset, final=True, place=f" line {number}")
        offset += len(line)
        yield number, text


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {key!r} more than once")
    return value


def _parse_line(line: str, *, where: str) -> object:
    value: object = None
    line = line.rstrip("\r\n")
    try:
        value = json.loads(line, object_pairs_hook=_each_key_once)
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}"
        if line.strip() in ("[", "{"):
            what = f"the line ends after {line.strip()!r}"
        if line.lstrip().startswith("["):
            what += f"; {ARRAY_ADVICE}"
        elif "\r" in line.strip():
            what += "; lines must end in \\n, not \\r: tr '\\r' '\\n' < old > new.jsonl"
        elif line.strip() == "{":
            what += "; write each object on one line: jq -c . old.json > new.jsonl"
        raise DataError(f"{where} must be one JSON object: {what}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} must be one JSON object: {_reason(error)}") from error
    if isinstance(value, list):
        raise DataError(f"{where} must be one JSON object: it is an array; {ARRAY_ADVICE}")
    return value


def _reason(error: Exception) -> str:
    # without Python's advice to programmers, after a semicolon
    return str(error).partition(";")[0]


def read_json(part: Part, wanted: Collection[str]) -> Iterator[Row]:
    """Yield the items of an array; a file that does not begin with one is JSON Lines."""
    start = part.head().removeprefix(b"\xef\xbb\xbf").lstrip()
    read = _items if start.startswith(b"[") else partial(read_json_lines, wanted=wanted)
    return read(part)


def _items(part: Part) -> Iterator[Row]:
    """Yield the items of an array, of which one at a time is held, with a block of text."""
    decoder = json.JSONDecoder(object_pairs_hook=_each_key_once)
    text = _Text(part)
    text.next()
    number, end = 0, text.next() if text.peek() == "]" else ","
    while end == ",":
        number += 1
        where = f"{part.name} item {number}"
        try:
            yield Row(text.take(decoder), where)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} must be a JSON object: {_reason(error)}; mend the array, or write JSON "
                f"Lines, whose mistakes have line numbers"
            ) from error
        end = text.next()
        if end not in (",", "]"):
            got = repr(end) if end else "the end of the file"
            raise DataError(f"{where} must be followed by , or ], got {got}; mend the array")
    if more := text.peek():
        raise DataError(
            f"{part.name} must end with its array, got {more!r} after item {number}; write several "
            f"arrays as JSON Lines: jq -c '.[]' old.json > new.jsonl"
        )


class _Text:
    """The text of a file, of which only what is not yet taken is held."""

    def __init__(self, part: Part) -> None:
        self._part, self._blocks = part, part.blocks()
        self._text, self._at = "", 0
        self._data, self._offset, self._is_whole = b"", 0, False

    def peek(self) -> str:
        """Return the next character that is not white, or nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in WHITE:
                self._at += 1
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def next(self) -> str:
        """Take the next character that is not white."""
        character = self.peek()
        self._at += len(character)
        return character

    def take(self, decoder: json.JSONDecoder) -> object:
        """Return the next value; raise ValueError for what is no JSON."""
        self.peek()
        while True:
            size = len(self._text) - self._at
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if size > MAX_LINE_BYTES:
                    raise ValueError(f"it is longer than {MAX_LINE_BYTES >> 20} MiB") from error
                is_cut = error.msg.startswith("Unterm") or error.pos > len(self._text) - CUT_CHARS
                # a long value is not parsed again at each block, but each time its text doubled
                if not (is_cut and self._read(2 * size)):
                    raise ValueError(error.msg) from error
            else:
                if end == len(self._text) and self._read():
                    continue  # a number may go on
                self._at = end
                return value

    def _read(self, size: int = 1) -> bool:
        """Read on until `size` characters are held; return whether there were more."""
        parts = [self._text[self._at :]]
        held = before = len(parts[0])
        while held < size or held == before:
            block = next(self._blocks, b"")
            self._data += block
            text, used = self._part.decode(self._data, offset=self._offset, final=not block)
            self._data, self._offset = self._data[used:], self._offset + used
            parts.append(text)
            held += len(text)
            if not block:
                break
        self._text, self._at = "".join(parts), 0
        return held > before


def read_table(part: Part, wanted: Collection[str], *, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first row names the columns; each value is text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader((line for _, line in _lines(part)), delimiter=delimiter, strict=True)
    header: list[str] = []
    first = 1
    while True:
        where = f"{part.name} line {first}"
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            # without Python's advice to programmers, after a dash
            what = str(error).partition(" - ")[0]
            raise DataError(
                f"{where} must be a row of {delimiter!r}-separated values: {what}; put values with "
                f'that, with quotes or line ends in quotes, and write a quote in them twice: ""'
            ) from error
        first = rows.line_num + 1
        if not header:
            header = values
            if len(set(header)) < len(header):
                (name, _), *_ = Counter(header).most_common(1)
                raise DataError(f"{where} must name each column once, got {name!r} twice")
        elif values and len(values) != len(header):
            raise DataError(
                f"{where} must have {len(header)} values, as the first row, got {len(values)}; "
                f"put values with {delimiter!r} or line ends in quotes"
            )
        elif values:
            yield Row(dict(zip(header, values, strict=True)), where)


def read_parquet(part: Part, wanted: Collection[str]) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    pyarrow = _pyarrow(part)
    import pyarrow.parquet as parquet

    def batches() -> Iterator[Any]:
        # without pre_buffer a row group is read as it is used, column by column
        with parquet.ParquetFile(part.path, pre_buffer=False) as file:
            size, total = part.path.stat().st_size, max(file.metadata.num_rows, 1)
            names = _columns(file.schema_arrow.names, wanted, part=part)
            done = 0
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                done += batch.num_rows
                part.progress.reach(size * done // total)
                yield batch

    return _rows(part, batches(), wanted, broken=pyarrow.ArrowException)


def read_arrow(part: Part, wanted: Collection[str]) -> Iterator[Row]:
    """Yield the rows of an Arrow file, or of a stream in a file, as `datasets` writes it."""
    pyarrow = _pyarrow(part)

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(part.path)) as source:
            if part.head().startswith(b"ARROW1"):
                file = pyarrow.ipc.open_file(source)
                each = map(file.get_batch, range(file.num_record_batches))
            else:
                each = pyarrow.ipc.open_stream(source)
            for batch in each:
                yield batch
                part.progress.reach(source.tell())
            source.seek(-len(STREAM_END), 2)
            if not (part.head().startswith(b"ARROW1") or source.read() == STREAM_END):
                raise EOFError("the stream has no end")

    return _rows(part, batches(), wanted, broken=pyarrow.ArrowException)


def _pyarrow(part: Part) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"reading {part.name} needs the package 'pyarrow'; "
            f"install it, in the repository, with: pip install -e '.[data]'"
        ) from error
    return pyarrow


def _rows(
    part: Part, batches: Iterator[Any], wanted: Collection[str], broken: Any
) -> Iterator[Row]:
    """Yield the rows of batches of columns, a few at a time."""
    number = 0
    try:
        with readable(part.name):
            for batch in batches:
                columns = batch.select(_columns(batch.schema.names, wanted, part=part))
                for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                    some = columns.slice(first, ROWS_AT_ONCE)
                    some.validate(full=True)
                    for value in some.to_pylist():
                        number += 1
                        yield Row(value, f"{part.name} row {number}")
    except broken as error:
        raise DataError(
            f"cannot read {part.name} after row {number}: it is cut short or damaged "
            f"({error!s:.200}); write it anew"
        ) from error


def _columns(names: Sequence[str], wanted: Collection[str], *, part: Part) -> list[str]:
    """Return the columns to read: all, where one is missing, for the message that lists them."""
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{part.name} must name each column once, got {repeated[0]!r} twice")
    return [*(wanted if wanted and set(wanted) <= set(names) else names)]

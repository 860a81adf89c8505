"""Rows of tables: CSV by the standard library, Parquet and Arrow by `pyarrow` (the `data` extra).

Arrow knows no absent key: a struct has all keys of its type, those without a value with null. So
keys inside a value that are null are left out, as templates of chats expect.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.data.parts import FREE_BYTES, MAX_GROWTH, MAX_LINE_BYTES, Part, readable
from torchtitan.data.rows import Row

ROWS_AT_ONCE = 256
STREAM_END = b"\0\0\0\0"


def read_table(part: Part, wanted: Collection[str], *, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first row names the columns; each value is text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    header: list[str] = []
    first, held = 1, 0

    def lines() -> Iterator[str]:
        nonlocal held
        for _, line in part.lines():
            held += len(line)
            if held > MAX_LINE_BYTES:  # quotes may join lines without end
                raise DataError(
                    f"the row at {part.name} line {first} is longer than {MAX_LINE_BYTES >> 20} MiB"
                )
            yield line

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        where, held = f"{part.name} line {first}", 0
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
        raw, done = part.stream.raw, 0
        # by its path, and without pre_buffer, a row group is read as it is used
        with parquet.ParquetFile(raw.name, pre_buffer=False) as file:
            size, num_rows = raw.seek(0, os.SEEK_END), file.metadata.num_rows
            names = _columns(file.schema_arrow.names, wanted, part=part)
            longest = _longest_value(file.metadata, names, part=part)
            at_once = max(1, min(ROWS_AT_ONCE, MAX_LINE_BYTES // longest))
            for batch in file.iter_batches(at_once, columns=names):
                before, done = done, done + batch.num_rows
                raw.advance(size * done // num_rows - size * before // num_rows)
                yield batch

    return _rows(part, batches(), wanted, broken=pyarrow.ArrowException)


def _longest_value(metadata: Any, names: Collection[str], *, part: Part) -> int:
    """Return how many bytes a value of these columns may have at most.

    A few bytes may unpack to gigabytes, and each row may be the same long value.
    """
    longest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        columns = [c for c in columns if c.path_in_schema.partition(".")[0] in names]
        unpacked = sum(c.total_uncompressed_size for c in columns)
        if unpacked > FREE_BYTES + MAX_GROWTH * sum(c.total_compressed_size for c in columns):
            raise DataError(
                f"{part.name} unpacks to over {MAX_GROWTH} times its size, as text does not: row "
                f"group {number} to {unpacked / 1e6:.0f} MB; look at what is in it, and write it "
                f"as .jsonl if you want it read"
            )
        longest = max(longest, unpacked)
    return longest


def read_arrow(part: Part, wanted: Collection[str]) -> Iterator[Row]:
    """Yield the rows of an Arrow file, or of a stream in a file, as `datasets` writes it."""
    pyarrow = _pyarrow(part)

    def batches() -> Iterator[Any]:
        is_file = part.head().startswith(b"ARROW1")
        raw = part.stream.raw
        raw.seek(0)
        if is_file:
            file = pyarrow.ipc.open_file(raw)
            yield from map(file.get_batch, range(file.num_record_batches))
            return
        yield from pyarrow.ipc.open_stream(raw)
        raw.seek(-len(STREAM_END), os.SEEK_END)
        if raw.read() != STREAM_END:
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
                    # a row at a time: they may share one long value, which each copies
                    for values in zip(*some.columns, strict=True):
                        number += 1
                        pairs = zip(some.schema.names, values, strict=True)
                        row = {key: _without_nulls(item.as_py()) for key, item in pairs}
                        yield Row(row, f"{part.name} row {number}")
    # ValueError and OverflowError: of values that Python has no type for, as nanoseconds
    except (broken, ValueError, OverflowError) as error:
        raise DataError(
            f"cannot read {part.name} after row {number}: it is cut short or damaged, or "
            f"has values of an unknown kind ({error!s:.200}); write it anew, with the columns that "
            f"are needed"
        ) from error


def _columns(names: Sequence[str], wanted: Collection[str], *, part: Part) -> list[str]:
    """Return the columns to read: all, where one is missing, for the message that lists them."""
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{part.name} must name each column once, got {repeated[0]!r} twice")
    return [*(wanted if wanted and set(wanted) <= set(names) else names)]


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value

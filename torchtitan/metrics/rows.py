"""Rows of `metrics.jsonl` and `events.jsonl`: one JSON object with a step per line.

A run's folder may come from anyone, so tools check what they read: a key that is missing, or a
figure that is not a number (`figure_of`), is an error that names the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.base.files import check_is_file, load_json

Row = dict[str, Any]
RECORD = "metrics"
"""Name of the metrics file without its suffix."""


class StoredRow(Row):
    """A row read from a file. `place` names its line in the error of a missing key."""

    def __init__(self, content: Row, *, place: str = "a row") -> None:  # asdict() names no place
        super().__init__(content)
        self.place = place

    def __missing__(self, key: str) -> Any:
        raise DataError(f"{self.place} has no {key!r}; restore the file")

    def __reduce__(self) -> Any:
        return partial(StoredRow, place=self.place), (dict(self),)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. An incomplete last line, left by a crash, is skipped.

    Raises:
        DataError: The file cannot be read, or another line is not a row.
    """
    wrong = ""
    try:
        check_is_file(path)
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if wrong:
                    raise DataError(f"{wrong}; fix the file or move it away")
                place = f"{path} line {number}"
                if (row := _parse(line, place=place)) is not None:
                    yield row
                elif line.endswith("\n"):  # else it may still be written
                    wrong = f"{place} must be a JSON object with a step, got {line.strip()[:60]!r}"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _parse(line: str, *, place: str) -> Row | None:
    try:
        row = load_json(line, object_hook=partial(StoredRow, place=place))
    except (ValueError, RecursionError):  # more than 4300 digits; deep nesting
        return None
    step = row.get("step") if isinstance(row, StoredRow) else None
    return row if type(step) is int and 0 <= step < 2**63 else None


def figure_of(row: Row, name: str) -> float | None:
    """Return a figure of a row, or None if it is missing or not finite.

    Raises:
        DataError: The value is not a number.
    """
    value = row.get(name)
    if value is not None and not isinstance(value, int | float):
        place = row.place if isinstance(row, StoredRow) else f"step {row['step']}"
        raise DataError(
            f"{place}: {name!r} must be a number or null, got {str(value)[:60]!r}; restore the file"
        )
    # an integer may be too large for a float
    if value is None or abs(value) > 1e300 or not isfinite(value):
        return None
    return float(value)


@contextmanager
def convert_os_errors(path: str) -> Iterator[None]:
    """Raise an OSError of writing figures to `path` as DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; make room and run the same "
            f"command to resume"
        ) from error

"""Rows of `metrics.jsonl` and `events.jsonl`: one JSON object with a step per line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.base.files import check_is_file, load_json

Row = dict[str, Any]
RECORD = "metrics"
"""Name of the metrics file without its suffix."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. A damaged last line, left by a crash, is skipped. Raises DataError
    if the file cannot be read, or another line is not a row."""
    try:
        check_is_file(path)
        with path.open("rb") as lines:
            damaged = ""
            for number, line in enumerate(lines, start=1):
                if damaged:
                    raise DataError(f"{path} {damaged}; fix the file or move it away")
                if (row := _parse(line)) is not None:
                    yield row
                else:
                    text = line.decode(errors="replace").strip()
                    damaged = f"line {number} must be a JSON object with a step, got {text[:60]!r}"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _parse(line: bytes) -> Row | None:
    try:
        row = load_json(line)
    except (ValueError, RecursionError):  # more than 4300 digits; deep nesting
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and 0 <= step < 2**63 else None


def figure_of(row: Row, name: str) -> float | None:
    """Return a figure of a row, or None if it is missing or not finite; raise DataError if the
    value is not a number."""
    value = row.get(name)
    if value is not None and not isinstance(value, int | float):
        raise DataError(f"step {row['step']}: {name!r} must be a number, got {value!r:.60}")
    # an integer may be too large for a float
    return None if value is None or abs(value) > 1e300 or not isfinite(value) else float(value)


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

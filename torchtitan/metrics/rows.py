"""Rows of a run's files, `metrics.jsonl` and `ledger.jsonl`: one JSON object with a step per line.

A run's folder may come from anyone. Tools ask a row for a key, or for a number by `figure_of`; what
is missing or of another type is an error that names the line.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.base.files import load_json, read_text

Row = dict[str, Any]
RECORD = "metrics"


class StoredRow(Row):
    """An object in a line of a file, which names the line when a key is not there."""

    def __init__(self, content: Row, *, place: str = "a row") -> None:  # asdict() names no place
        super().__init__(content)
        self.place = place

    def __missing__(self, key: str) -> Any:
        raise DataError(f"{self.place} must have {key!r}, and lacks it; restore the file")

    def __reduce__(self) -> Any:
        return partial(StoredRow, place=self.place), (dict(self),)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; a last line torn by a crash is left out.

    Raises DataError, naming the line, when the file holds something else.
    """
    try:
        lines = read_text(path, errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise DataError(
            f"{path} must be a file of figures, it cannot be read: {error.strerror}; move it away"
        ) from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line, place=f"{path} line {number}")
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise DataError(
                f"each line of {path} must be a JSON object with a step, got {line.strip()[:60]!r} "
                f"on line {number}; move the file away or mend it"
            )
    return rows


def _parse(line: str, *, place: str) -> Row | None:
    try:
        row = load_json(line, object_hook=partial(StoredRow, place=place))
    except (ValueError, RecursionError):  # numbers of > 4300 digits; endless brackets
        return None
    step = row.get("step") if isinstance(row, StoredRow) else None
    return row if type(step) is int and 0 <= step < 2**63 else None


def figure_of(row: Row, name: str) -> float | None:
    """Return a figure of a row; None where it has none, or one that is not finite.

    Raises:
        DataError: It is no number.
    """
    value = row.get(name)
    if value is not None and not isinstance(value, int | float):
        place = row.place if isinstance(row, StoredRow) else f"step {row['step']}"
        raise DataError(
            f"{place}: {name!r} must be a number or null, got {str(value)[:60]!r}; restore the file"
        )
    # a whole number may be too large for a float
    if value is None or abs(value) > 1e300 or not isfinite(value):
        return None
    return float(value)

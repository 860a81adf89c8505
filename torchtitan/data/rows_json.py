"""Rows of JSON: Lines, or one array."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator

from torchtitan.base.errors import DataError
from torchtitan.data.parts import MAX_LINE_BYTES, Part
from torchtitan.data.rows import Row, numbered_lines

ARRAY_ADVICE = (
    "JSON Lines have one object per line; give an array the suffix .json, or convert it: "
    "jq -c '.[]' old.json > new.jsonl"
)
WHITE = " \t\r\n"
# where an item that is cut off may be found wrong: a number, a word or an escape at its end
CUT_CHARS = 16


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {key!r} more than once")
    return value


# json.loads would make one for each line
DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once)


def read_json_lines(part: Part, wanted: Collection[str]) -> Iterator[Row]:
    """Yield the value of each line that is not blank."""
    for number, line in numbered_lines(part):
        if line.strip():
            where = f"{part.name} line {number}"
            yield Row(_parse_line(line, where=where), where)


def _parse_line(line: str, *, where: str) -> object:
    value: object = None
    line = line.rstrip("\r\n")
    try:
        value = DECODER.decode(line)
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
    return _items(part) if start.startswith(b"[") else read_json_lines(part, wanted)


def _items(part: Part) -> Iterator[Row]:
    """Yield the items of an array, of which one at a time is held, with a block of text."""
    text = _Text(part)
    text.next()
    number, end = 0, text.next() if text.peek() == "]" else ","
    while end == ",":
        number += 1
        where = f"{part.name} item {number}"
        try:
            yield Row(text.take(), where)
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

    def take(self) -> object:
        """Return the next value; raise ValueError for what is no JSON."""
        self.peek()
        while True:
            size = len(self._text) - self._at
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
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

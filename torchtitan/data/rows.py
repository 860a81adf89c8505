"""Files of rows: one reader for each format, and the text of a row.

A reader yields the rows of a file in order, each with its place for messages, and never holds more
than a few of them. It checks what its format alone can tell. What a row must hold is checked once
for all formats: a text here, an example to fine-tune on in `sft/examples.py`. So the same rows give
the same tokens in any format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchtitan.base.errors import DataError
from torchtitan.data.parts import HEAD_BYTES, Part
from torchtitan.data.text import check_characters

MAX_LINE_BYTES = 1 << 28
ARRAY_ADVICE = (
    "JSON Lines have one object per line; convert an array: jq -c '.[]' old.json > new.jsonl"
)


class Row(NamedTuple):
    """The value of a row, an object where all is well, and its file and number for messages."""

    value: object
    where: str


Reader = Callable[[Part], Iterator[Row]]


class WrongKeyError(DataError):
    """A row without text under the key."""


def text_of(row: Row, key: str) -> str:
    """Return the text under a key of a row, or raise DataError."""
    value, where = row
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a JSON object, got {type_name(value)}")
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


def read_json_lines(part: Part) -> Iterator[Row]:
    """Yield the value of each line that is not blank."""
    for number, line in _lines(part):
        if line.strip():
            where = f"{part.name} line {number}"
            yield Row(_parse_line(line, where=where), where)


def _lines(part: Part) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without its end."""
    offset = 0
    for number, line in enumerate(_split(part), start=1):
        text, _ = part.decode(line, offset=offset, final=True, place=f" line {number}")
        offset += len(line) + 1
        yield number, text


def _split(part: Part) -> Iterator[bytes]:
    # the parts of a long line are joined once, at its end: joined at each block, they would be
    # copied as many times as there are blocks
    parts: list[bytes] = []
    size = 0
    for block in part.blocks():
        first, *others = block.split(b"\n")
        parts.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            start = b"".join(parts)[:HEAD_BYTES].decode(errors="replace").lstrip("\ufeff \t\r")
            what = ARRAY_ADVICE if start.startswith("[") else "cut it into documents"
            raise DataError(
                f"a line of {part.name} is longer than {MAX_LINE_BYTES >> 20} MiB, beginning with "
                f"{start[:40]!r}; {what}"
            )
        if others:
            yield b"".join(parts)
            *lines, last = others
            yield from lines
            parts, size = [last], len(last)
    if size:
        yield b"".join(parts)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {key!r} more than once")
    return value


def _parse_line(line: str, *, where: str) -> object:
    value: object = None
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
        # without Python's advice to programmers, after a semicolon
        what = str(error).partition(";")[0]
        raise DataError(f"{where} must be one JSON object: {what}") from error
    if isinstance(value, list):
        raise DataError(f"{where} must be one JSON object: it is an array; {ARRAY_ADVICE}")
    return value


def type_name(value: object) -> str:
    """Return the name of a value's JSON type, and the value if it is short."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    shown = "" if value is None or isinstance(value, list | dict) else f", {value!r:.40}"
    return f"{names[type(value)]}{shown}"

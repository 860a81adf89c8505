"""Files of rows: what a reader of them is, and the text of a row.

A reader yields the rows of a file in order, each with its place for messages, and never holds more
than a few of them. It checks what its format alone can tell: `rows_json.py`, `rows_table.py`. What
a row must hold is checked once for all formats: a text here, an example to fine-tune on in
`sft/shapes.py`. So the same rows give the same tokens in any format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from torchtitan.base.errors import DataError
from torchtitan.data.parts import Part
from torchtitan.data.settings import template_parts
from torchtitan.data.text import check_characters


class Row(NamedTuple):
    """The value of a row, an object where all is well, and its file and number for messages."""

    value: object
    where: str


Reader = Callable[[Part, Collection[str]], Iterator[Row]]
"""Yields rows; it may leave out columns that are not among the given ones, unless none is given."""


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
        texts = []
        for literal, key in self._parts:
            texts += [literal, "" if key is None else _text_under(key, value, where=where)]
        return "".join(texts)


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


def numbered_lines(part: Part) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, with its end."""
    offset = 0
    for number, line in enumerate(part.lines(), start=1):
        text, _ = part.decode(line, offset=offset, final=True, place=f" line {number}")
        offset += len(line)
        yield number, text

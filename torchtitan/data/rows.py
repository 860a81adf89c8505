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


class RowText:
    """Takes the text out of rows: what is under a key, or the template with its keys filled in.

    `setting`: what errors call the key or the template.
    """

    def __init__(self, key: str, template: str | None, *, setting: str) -> None:
        self._parts = [("", key)] if template is None else template_parts(template)
        self.keys = [key for _, key in self._parts if key is not None]
        self._setting = setting

    def __call__(self, row: Row) -> str:
        """Return the text of a row, or raise DataError."""
        value, where = row
        if not isinstance(value, dict):
            raise DataError(f"{where} must be a JSON object, got {type_name(value)}")
        texts = []
        for literal, key in self._parts:
            texts += [literal, "" if key is None else self._text_under(key, value, where=where)]
        return "".join(texts)

    def _text_under(self, key: str, value: dict[str, object], *, where: str) -> str:
        text = value.get(key)
        if isinstance(text, str):
            check_characters(text, where=where)
            return text
        got = f"keys {', '.join(map(repr, value))}" if value else "no keys"
        said = f"{where} must have text under the key {key!r}, got "
        said += type_name(text) if key in value else f"{got:.300}"
        if key not in value and ("messages" in value or {"prompt", "completion"} <= value.keys()):
            raise DataError(f'{said}; chats and completions are for dataset = "examples"')
        rule = f"{said}; write text there, or name the key that holds it"
        raise DataError.at(self._setting, rule)


def type_name(value: object) -> str:
    """Return the name of a value's JSON type, and the value if it is short."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    shown = "" if value is None or isinstance(value, list | dict) else f", {value!r:.40}"
    return f"{names.get(type(value), type(value).__name__)}{shown}"

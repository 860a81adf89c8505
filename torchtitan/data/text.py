"""Pieces of text, and what readers and tokenizers share: types, cuts and checks.

Long text is tokenized in pieces. The position of a cut decides whether the pieces get the same ids
as the full text, so readers and tokenizers cut with the functions here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError

LFS_POINTER = b"version https://git-lfs.github.com"
Ids = npt.NDArray[np.uint32]


class Piece(NamedTuple):
    """A part of a document's text. The pieces of a document follow each other."""

    text: str
    ends_document: bool
    where: str
    """The file or row that holds the text."""


def cut_point(text: str, *, limit: int) -> int:
    """Return the number of characters, at most `limit`, in the first piece of `text`.

    Byte-pair encoders work on words found by a pattern. A cut after a line end that no space
    follows, or else before a run of white space, is between two words, so the pieces get the ids
    of the full text (with the patterns of GPT-2 and Llama 3, if the text has such a position).
    Within a run it is not, and a line end belongs to the punctuation before it.
    """
    if len(text) <= limit:
        return len(text)
    newline = limit
    while (newline := text.rfind("\n", 0, newline)) >= 0:
        if not text[newline + 1].isspace():
            return newline + 1
    space = limit
    while (space := text.rfind(" ", 1, space)) > 0:
        if not text[space - 1].isspace():
            return space
    return limit


def split_text(text: str, *, limit: int) -> Iterator[str]:
    """Yield `text` in pieces of at most `limit` characters."""
    while text:
        cut = cut_point(text, limit=limit)
        yield text[:cut]
        text = text[cut:]


def any_of(names: Collection[str]) -> str:
    """Return a pattern that matches the longest of several names, or never without names."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def check_characters(text: str, *, where: str) -> None:
    """Raise DataError for text with half of a surrogate pair, which JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} must hold complete characters, character {error.start} is half of a "
            f"surrogate pair (\\ud800 to \\udfff); remove or replace it"
        ) from error


def check_fetched(file: PurePath, head: bytes) -> None:
    """Raise DataError if a file is the pointer that Git LFS writes until the file is fetched."""
    if head.startswith(LFS_POINTER):
        raise DataError(
            f"{file} is a pointer of Git LFS, not the file itself; fetch it: git lfs pull"
        )

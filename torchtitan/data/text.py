"""What readers and tokenizers share: names of end tokens, checks of files and text, cutting.

Long text is tokenised in pieces. Where it is cut decides whether the pieces get the same ids as the
whole, so corpora and tokenizers cut with the functions here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError
from torchtitan.base.files import check_is_file

Ids = npt.NDArray[np.uint32]

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
LFS_POINTER = b"version https://git-lfs.github.com"


class Encoded(NamedTuple):
    """Ids of a text, and where each ends: one more than the last character that it is part of."""

    ids: Sequence[int]
    ends: Sequence[int]


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a tokenizer file; raise DataError if it cannot be read."""
    try:
        check_is_file(path)
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read tokenizer file {path}: {error.strerror}") from error
    check_fetched(path, data)
    return data


def check_fetched(file: PurePath, head: bytes) -> None:
    """Raise DataError if a file is the pointer that Git LFS leaves until it is fetched."""
    if head.startswith(LFS_POINTER):
        raise DataError(
            f"{file} is a pointer of Git LFS, not the file itself; fetch it: git lfs pull"
        )


def cut_point(text: str, *, limit: int) -> int:
    """Return how many characters, at most `limit`, the first piece of `text` takes.

    Byte-pair encoders work on words found by a pattern. A cut after a line end that no space
    follows, or else before a space, is between two words, so the pieces get the ids of the whole
    (for Llama 3's pattern, if the text has such a place).
    """
    if len(text) <= limit:
        return len(text)
    newline = limit
    while (newline := text.rfind("\n", 0, newline)) >= 0:
        if not text[newline + 1].isspace():
            return newline + 1
    space = text.rfind(" ", 1, limit)
    return space if space > 0 else limit


def split_text(text: str, *, limit: int) -> Iterator[str]:
    """Yield `text` in pieces of at most `limit` characters."""
    while text:
        cut = cut_point(text, limit=limit)
        yield text[:cut]
        text = text[cut:]


def any_of(names: Collection[str]) -> str:
    """Return a pattern that matches the longest of some names; without names it never matches."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def encode_around(
    text: str,
    *,
    special: Mapping[str, int],
    encode: Callable[[str], list[int]],
    num_bytes: Callable[[int], int],
) -> Encoded:
    """Return the ids of `text`, with the names of special tokens as their ids.

    `encode` encodes the text between them; `num_bytes` is the number of UTF-8 bytes of an id.
    """
    ids: list[int] = []
    sizes: list[int] = []
    for piece in re.split(f"({any_of(special)})", text):
        if piece in special:
            ids.append(special[piece])
            sizes.append(len(piece.encode()))
        else:
            ids += (plain := encode(piece))
            sizes += map(num_bytes, plain)
    data = np.frombuffer(text.encode(), np.uint8)
    # the first byte of each character
    characters = np.cumsum((data & 0xC0) != 0x80)
    return Encoded(ids, characters[np.cumsum(sizes, dtype=np.int64) - 1].tolist())


def check_characters(text: str, *, where: str) -> None:
    """Raise DataError for text with half of a surrogate pair, which JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} must hold whole characters, character {error.start} is half of a surrogate "
            f"pair (\\ud800 to \\udfff); remove or replace it"
        ) from error

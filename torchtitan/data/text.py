"""What every tokenizer needs: the names of the end tokens, files read, and text cut at word
borders and at special tokens.

Long text is tokenised in pieces. Where it is cut decides whether the pieces get the ids of the
whole, so the cutting is done in this one place, for corpora and tokenizers alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError

Ids = npt.NDArray[np.uint32]

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"


class Encoded(NamedTuple):
    """Ids of a text, and where in it each ends: one more than the last character it is part of."""

    ids: Sequence[int]
    ends: Sequence[int]


def read_bytes(path: Path) -> bytes:
    """Return a tokenizer file's bytes, or raise DataError saying why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read tokenizer file {path}: {error.strerror}") from error


def cut_point(text: str, *, limit: int) -> int:
    """Return how many characters, at most `limit`, to take off the front of `text` in one piece.

    Byte-pair encoders work on words that a pattern finds. A cut between a line end and a line that
    starts without a space, or else before a space, falls between two such words, so that (for
    Llama 3's pattern, where there is such a place) cut text gets the ids of the whole.
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
    """Return a pattern that finds the longest of some names, and nothing where there is none."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def encode_around(
    text: str,
    *,
    special: Mapping[str, int],
    encode: Callable[[str], list[int]],
    num_bytes: Callable[[int], int],
) -> Encoded:
    """Return the ids of `text`, in which special tokens stand for themselves.

    `encode` gives the ids of what stands between them, bytes of UTF-8 in the order of the text, and
    `num_bytes` how many an id is made of.
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
    # every byte but those that go on with a character begins one
    characters = np.cumsum((data & 0xC0) != 0x80)
    return Encoded(ids, characters[np.cumsum(sizes, dtype=np.int64) - 1].tolist())

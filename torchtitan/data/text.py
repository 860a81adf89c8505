"""What every tokenizer needs: the names of the end tokens, files read, and text cut at word
borders.

Long text is tokenised in pieces. Where it is cut decides whether the pieces get the ids of the
whole, so the cutting is done in this one place, for corpora and tokenizers alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError

Ids = npt.NDArray[np.uint32]

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"


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

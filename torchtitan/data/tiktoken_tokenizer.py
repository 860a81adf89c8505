"""Read a tiktoken file as a `Tokenizer` (see `tokenizer.py`)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.data.text import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    Encoded,
    Ids,
    encode_with_special,
    read_file,
    split_text,
)

# the split pattern of Llama 3 (contractions, words, up to 3 digits, punctuation, white space)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS = 128_000
# tiktoken's regular expressions overflow their stack on a run of about 700,000 spaces
MAX_CHARS = 1 << 16


class TiktokenTokenizer:
    """A byte-pair tokenizer read from a tiktoken file: one `base64(token) rank` per line.

    The file holds only byte strings in order of merging; the split pattern and the special tokens
    are conventions. Every file is read with Llama 3's pattern. A file of exactly 128,000 ranks is
    Llama 3's and gets its 256 special tokens; any other file gets a begin and an end token after
    its ranks. tiktoken encodes five times as fast as `tokenizers`, while other threads run. Its own
    loader is not used: it keeps copies in a temporary folder and does not check the content.
    """

    encodes_pieces = True

    def __init__(self, file: Path) -> None:
        import tiktoken

        self._file = file
        ranks = read_ranks(file)
        is_llama3 = len(ranks) == LLAMA3_RANKS
        names = _llama3_special_tokens() if is_llama3 else [BEGIN_OF_TEXT, END_OF_TEXT]
        self.special_tokens = {name: len(ranks) + i for i, name in enumerate(names)}
        self.vocab_size = len(ranks) + len(self.special_tokens)
        self.eos_id = self.special_tokens[END_OF_TEXT]
        self.begin_ids = [self.special_tokens[BEGIN_OF_TEXT]] if is_llama3 else []
        parts = [list(map(bytes.hex, ranks)), LLAMA3_PATTERN, names, MAX_CHARS]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self._encoding = tiktoken.Encoding(
            file.name,
            pat_str=LLAMA3_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_tokens,
        )

    def __reduce__(self) -> tuple[object, ...]:
        from torchtitan.data.tokenizer import build_cached

        return build_cached, (str(self._file),)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Special tokens written in it are plain text."""
        ids: list[int] = self._encode_array(text).tolist()
        return ids

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with names of special tokens encoded as their ids."""
        token = self._encoding.decode_single_token_bytes
        return [
            encode_with_special(
                text,
                special=self.special_tokens,
                encode=self.encode,
                num_bytes=lambda i: len(token(i)),
            )
            for text in texts
        ]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text. tiktoken releases the interpreter lock meanwhile."""
        return [self._encode_array(text) for text in texts]

    def _encode_array(self, text: str) -> Ids:
        # not encode_to_numpy, which is faster: before tiktoken 0.11 it read special tokens in text
        encode = self._encoding.encode_ordinary
        pieces = split_text(text, limit=MAX_CHARS)
        arrays = [np.array(encode(piece), np.uint32) for piece in pieces]
        return np.concatenate(arrays) if arrays else np.empty(0, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Cut characters and unknown ids become U+FFFD."""
        token = self._encoding.decode_single_token_bytes
        parts = (token(i) if 0 <= i < self.vocab_size else b"\xff" for i in ids)
        return b"".join(parts).decode(errors="replace")


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks of a tiktoken file by token; raise DataError that names a wrong line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, read_file(file).splitlines()), start=1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            is_valid = int(rank) == len(ranks) and token and token not in ranks
        except ValueError:
            is_valid = False
        if not is_valid:
            raise DataError(
                f"line {number} of tokenizer file {file} must be a new token in base64 and the "
                f"rank {len(ranks)}, got {line[:60]!r} (of a SentencePiece model use its "
                f"tokenizer.json)"
            )
        ranks[token] = len(ranks)
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise DataError(f"tokenizer file {file} must hold all 256 single bytes")
    return ranks


def _llama3_special_tokens() -> list[str]:
    """Return the names of Llama 3's ids 128,000 to 128,255."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(251)]
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    names = [BEGIN_OF_TEXT, END_OF_TEXT, *reserved[:4], *headers]
    return [*names, reserved[4], "<|eot_id|>", *reserved[5:]]

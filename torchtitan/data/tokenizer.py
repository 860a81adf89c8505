"""Text to token ids and back: one protocol and three implementations.

A tokenizer maps text to ids and back, names the id that ends a document, and has a fingerprint of
everything that decides the ids, which tokenized data and checkpoints store. It knows nothing of
batches, padding or chats. Special tokens written in a text are plain text: a document that contains
`<|end_of_text|>` does not end there. Only `encode_special`, for the output of chat templates, reads
them as tokens.

`ByteTokenizer` needs no file and suits tests. `tiktoken_tokenizer.py` reads tiktoken files, such as
Llama 3's `tokenizer.model` and the built-in `bpe_2048` (made by `torchtitan tokenizer`, for
small models). `hf_tokenizer.py` reads `tokenizer.json`. Both are imported when such a tokenizer is
built; neither needs the network, nor runs code of the model's author.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.files import user_path
from torchtitan.data.text import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    Encoded,
    Ids,
    encode_with_special,
)

BUILT_IN = {"bpe_2048": Path(__file__).parent / "assets" / "bpe_2048.tiktoken"}


class Tokenizer(Protocol):
    """The interface that data and generation use."""

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id."""

    @property
    def eos_id(self) -> int:
        """Return the id that follows each document."""

    @property
    def fingerprint(self) -> str:
        """Return a SHA-256 of everything that decides the ids of a text."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the ids of the special tokens by name."""

    @property
    def begin_ids(self) -> Sequence[int]:
        """Return the ids that inference puts before a text, often none or a begin token."""

    @property
    def encodes_pieces(self) -> bool:
        """Return whether the pieces of `split_text` get the ids of the full text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without begin and end tokens."""

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with names of special tokens encoded as their ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text. Other threads can run meanwhile if the package allows it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Cut characters become U+FFFD; unknown ids raise no error."""


def build_tokenizer(path: str, *, key: str = "model.tokenizer_path") -> Tokenizer:
    """Build the tokenizer that the setting `key` names.

    `byte` and `bpe_2048` are built in. A folder or a `.json` file is read as Hugging Face's, any
    other file as tiktoken's.

    Raises:
        DataError: The file is missing or damaged, or has no end token.
    """
    if path == "byte":
        return ByteTokenizer()
    file = BUILT_IN.get(path) or user_path(path, key=key)
    if not file.exists():
        rule = (
            f"must be a file, a folder with tokenizer.json, or one of "
            f"{', '.join(['byte', *BUILT_IN])}; {path!r:.200} does not exist, and nothing is "
            f"downloaded"
        )
        raise DataError.at(key, rule)
    if file.is_dir():
        file /= "tokenizer.json"
        if not file.exists():
            rule = f"the folder {path!r} has no tokenizer.json; name one, or a tiktoken file"
            raise DataError.at(key, rule)
    if file.suffix != ".json":
        from torchtitan.data.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer(file)
    from torchtitan.data.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(file)


@cache
def build_cached(path: str) -> Tokenizer:
    """Return the tokenizer of a path, built once per process, as a large vocabulary takes long."""
    return build_tokenizer(path)


def find_tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer, or None if this machine does not have its file."""
    exists = path == "byte" or BUILT_IN.get(path, Path(path).expanduser()).exists()
    return build_tokenizer(path) if exists else None


def check_vocabulary(tokenizer: Tokenizer, *, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id without an embedding in the model."""
    if tokenizer.vocab_size > model_vocab_size:
        rule = (
            f"the tokenizer's vocabulary must fit the model's: it has {tokenizer.vocab_size} ids, "
            f"the model {model_vocab_size}; raise vocab_size (docs/models.md), or choose another "
            f"flavor or tokenizer"
        )
        raise ConfigError.at(("model.tokenizer_path", "model.vocab_size"), rule)


class ByteTokenizer:
    """Each UTF-8 byte is its own id; 256 starts and 257 ends a text."""

    vocab_size = 258
    eos_id = 257
    begin_ids: Sequence[int] = ()
    encodes_pieces = True
    special_tokens: Mapping[str, int] = {BEGIN_OF_TEXT: 256, END_OF_TEXT: 257}
    fingerprint = hashlib.sha256(b"utf-8 bytes, begin 256, end 257").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the bytes of each text, and 256 and 257 for the special tokens."""
        return [
            encode_with_special(
                text, special=self.special_tokens, encode=self.encode, num_bytes=lambda _: 1
            )
            for text in texts
        ]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD."""
        special = {i: name.encode() for name, i in self.special_tokens.items()}
        parts = (bytes([i]) if 0 <= i < 256 else special.get(i, b"\xff") for i in ids)
        return b"".join(parts).decode(errors="replace")

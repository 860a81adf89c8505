"""Text to token ids and back: one small protocol with three implementations.

A tokenizer knows nothing of batches, padding or chats. It maps text to ids and back, names the id
that ends a document, and has a fingerprint of everything that decides the ids, by which tokenised
data and checkpoints find out whether they belong to it. Special tokens spelt in a text are plain
text: a document with `<|end_of_text|>` in it does not end there. Only `encode_special`, for the
output of chat templates, reads them as tokens.

`byte` needs no file and suits tests. `bpe_2048` comes with the package (made by
`scripts/train_tokenizer.py`) and suits small models. `tokenizer_tiktoken.py` reads tiktoken files
(Llama 3's `tokenizer.model`), `tokenizer_hf.py` reads Hugging Face's `tokenizer.json`; both are
imported only when needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.data.files import user_path
from torchtitan.data.text import BEGIN_OF_TEXT, END_OF_TEXT, Encoded, Ids, encode_around

ASSETS = Path(__file__).parent / "assets"
BUILT_IN = {"bpe_2048": ASSETS / "bpe_2048.tiktoken"}


class Tokenizer(Protocol):
    """What data and generation need of a tokenizer."""

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

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without begin and end tokens."""

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with the names of special tokens as their ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text; other threads can run meanwhile if the library allows it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; cut characters become U+FFFD, and unknown ids are no error."""


class ByteTokenizer:
    """Each UTF-8 byte is its own id; 256 begins and 257 ends a text."""

    vocab_size = 258
    eos_id = 257
    special_tokens: Mapping[str, int] = {BEGIN_OF_TEXT: 256, END_OF_TEXT: 257}
    fingerprint = hashlib.sha256(b"utf-8 bytes, begin 256, end 257").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the bytes of each text, and 256 and 257 where it names them."""
        return [
            encode_around(
                text, special=self.special_tokens, encode=self.encode, num_bytes=lambda _: 1
            )
            for text in texts
        ]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        named = {256: BEGIN_OF_TEXT.encode(), 257: END_OF_TEXT.encode()}
        parts = (bytes([i]) if 0 <= i < 256 else named.get(i, b"\xff") for i in ids)
        return b"".join(parts).decode(errors="replace")


def build_tokenizer(path: str, *, key: str = "model.tokenizer_path") -> Tokenizer:
    """Return the tokenizer that the setting `key` names.

    `byte` and `bpe_2048` are built in. A folder or a `.json` file is Hugging Face's, any other file
    is tiktoken's. Raises DataError if it is missing, damaged or has no end token.
    """
    if path == "byte":
        return ByteTokenizer()
    file = BUILT_IN.get(path) or user_path(path, key=key)
    if not file.exists():
        rule = (
            f"must be a file, a folder with tokenizer.json, or one of "
            f"{', '.join(['byte', *BUILT_IN])}; found nothing at {path!r:.200}, and nothing is "
            f"downloaded: get the file first"
        )
        raise DataError.at(key, rule)
    if file.is_dir() and not (file / "tokenizer.json").exists():
        rule = f"the folder {path!r} has no tokenizer.json; name one that has, or a tiktoken file"
        raise DataError.at(key, rule)
    if file.is_dir() or file.suffix == ".json":
        from torchtitan.data.tokenizer_hf import HuggingFaceTokenizer

        return HuggingFaceTokenizer(file)
    from torchtitan.data.tokenizer_tiktoken import TiktokenTokenizer

    return TiktokenTokenizer(file)


def find_here(path: str) -> Tokenizer | None:
    """Return the tokenizer if it is on this machine, which may not be the one of the job."""
    is_here = path == "byte" or BUILT_IN.get(path, Path(path).expanduser()).exists()
    return build_tokenizer(path) if is_here else None


def check_vocabulary(tokenizer: Tokenizer, *, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id without an embedding in the model."""
    if tokenizer.vocab_size > model_vocab_size:
        rule = (
            f"the tokenizer's vocabulary must fit the model's: it has {tokenizer.vocab_size} ids, "
            f"the model {model_vocab_size}; set vocab_size to as many rows or more "
            f"(docs/adapt.md), or choose another flavor or tokenizer"
        )
        raise ConfigError.at(("model.tokenizer_path", "model.vocab_size"), rule)

"""Text to token ids and back, by one small protocol with four implementations.

A tokenizer here knows nothing of batches, padding or chat: it maps text to ids, ids to text, names
the id that ends a document, and gives a fingerprint of everything that decides the ids, so that
tokenised data and checkpoints can tell whether they belong to it. Text is taken literally: a
document that happens to spell `<|end_of_text|>` cannot end itself, because only the code that cuts
documents may write special tokens. The one exception is asked for by name, `encode_special`: what a
chat template has written, in which special tokens divide the turns.

`byte` needs no file and suits tests. `bpe_2048` ships with the package (made by
`scripts/train_tokenizer.py`) and suits small models. tiktoken files (Llama 3's `tokenizer.model`)
live in `tokenizer_tiktoken.py`, Hugging Face's `tokenizer.json` in `tokenizer_hf.py`; both are
imported only when one is asked for. None of these formats can run code when it is read.
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
    """What the data path and the text generator need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id."""

    @property
    def eos_id(self) -> int:
        """Return the id written after each document."""

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that decides which ids a text gets."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the ids that no text has, by their names."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without begin or end token."""

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, in which the names of special tokens stand for these."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text; other threads run meanwhile where the library allows."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; never raises on cut characters (U+FFFD) or unknown ids."""


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
        """Return the text of `ids`; what is no UTF-8 becomes U+FFFD."""
        named = {256: BEGIN_OF_TEXT.encode(), 257: END_OF_TEXT.encode()}
        parts = (bytes([i]) if 0 <= i < 256 else named.get(i, b"\xff") for i in ids)
        return b"".join(parts).decode(errors="replace")


def build_tokenizer(path: str, *, key: str = "model.tokenizer_path") -> Tokenizer:
    """Return the tokenizer that the setting `key` names.

    `byte` and `bpe_2048` are built in; a folder or a `.json` file is read as Hugging Face's, any
    other file as tiktoken's. Raises DataError when it is missing, damaged or has no end token.
    """
    if path == "byte":
        return ByteTokenizer()
    file = BUILT_IN.get(path) or user_path(path, key=key)
    if not file.exists():
        raise DataError(
            f"{key} must be a file, a folder with tokenizer.json, or one of "
            f"{', '.join(['byte', *BUILT_IN])}; found nothing at {path!r:.200}, and nothing is "
            f"downloaded: get the file first"
        )
    if file.is_dir() and not (file / "tokenizer.json").exists():
        raise DataError(
            f"{key}: the folder {path!r} has no tokenizer.json; name a folder that has one, or a "
            f"tiktoken file itself"
        )
    if file.is_dir() or file.suffix == ".json":
        from torchtitan.data.tokenizer_hf import HuggingFaceTokenizer

        return HuggingFaceTokenizer(file)
    from torchtitan.data.tokenizer_tiktoken import TiktokenTokenizer

    return TiktokenTokenizer(file)


def find_here(path: str) -> Tokenizer | None:
    """Return the tokenizer if it is built in or on this machine, which may not be the job's."""
    is_here = path == "byte" or BUILT_IN.get(path, Path(path).expanduser()).exists()
    return build_tokenizer(path) if is_here else None


def check_vocabulary(tokenizer: Tokenizer, *, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer can produce an id that the model has no embedding for."""
    if tokenizer.vocab_size > model_vocab_size:
        raise ConfigError(
            f"the tokenizer's vocabulary must fit the model's: model.tokenizer_path has "
            f"{tokenizer.vocab_size} ids, the model {model_vocab_size}; "
            f"set model.vocab_size to as many rows or more (docs/adapt.md), or choose another "
            f"model.flavor or tokenizer"
        )

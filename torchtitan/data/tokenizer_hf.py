"""Hugging Face tokenizers: `tokenizer.json`, alone or in a model's folder.

Only the `tokenizers` library is used (the `hf` extra), never `transformers`: it reads the one JSON
file, needs no network and runs no code of the model's author. The file does not say which token
ends a document. `tokenizer_config.json` beside it does; without it, the names that known models use
are tried, and an unknown one is an error rather than a guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.data.text import END_OF_TEXT, Encoded, Ids, read_bytes

KNOWN_END_TOKENS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


class HuggingFaceTokenizer:
    """A tokenizer of any kind that the `tokenizers` library can read."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"reading {path} needs the package 'tokenizers'; "
                f"install it, in the repository, with: pip install -e '.[hf]'"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        text = read_bytes(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text.decode())
        # the library raises bare Exception for every fault of the file
        except Exception as error:
            raise DataError(f"{file} is no tokenizer.json that can be read: {error}") from error
        # truncation and padding stored in the file would lose text or add tokens
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # special tokens spelt in a document are plain text
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: i for i, token in added if token.special}
        # ids may have gaps, so that counting them is not enough
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_id = vocabulary[end_token(file, vocabulary)]
        self.fingerprint = hashlib.sha256(text + str(self.eos_id).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens spelt in it are plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_special(self, text: str) -> Encoded:
        """Return the ids of `text` in which the names of special tokens stand for these."""
        self._tokenizer.encode_special_tokens = False
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        # where they begin is not taken: byte-level tokenizers leave leading spaces out of it
        return Encoded(encoding.ids, [end for _, end in encoding.offsets])

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, encoded by the library's own threads."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; cut characters become U+FFFD, unknown ids are left out."""
        known = [i for i in ids if self._tokenizer.id_to_token(i) is not None]
        text: str = self._tokenizer.decode(known, skip_special_tokens=False)
        return text


def end_token(file: Path, vocabulary: dict[str, int]) -> str:
    """Return the name of the token that ends a document; raise DataError if none can be told."""
    config_file = file.with_name("tokenizer_config.json")
    if config_file.exists():
        try:
            config: Any = json.loads(read_bytes(config_file))
        except ValueError as error:
            raise DataError(f"{config_file} is no JSON: {error}") from error
        name = config.get("eos_token") if isinstance(config, dict) else None
        # either the name itself or a description of the token that holds it
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str) and name in vocabulary:
            return name
    for name in KNOWN_END_TOKENS:
        if name in vocabulary:
            return name
    raise DataError(
        f"cannot tell which token of {file} ends a document: tokenizer_config.json beside it names "
        f"none of its tokens as eos_token, and it has none of {', '.join(KNOWN_END_TOKENS)}; "
        f"put a tokenizer_config.json with eos_token beside it"
    )

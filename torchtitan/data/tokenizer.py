"""Text to token ids and back: one protocol and three implementations.

A tokenizer maps text to ids and back, names the id that ends a document, and has a fingerprint of
everything that decides the ids, which tokenized data and checkpoints store. It knows nothing of
batches, padding or chats. Special tokens written in a text are plain text: a document that contains
`<|end_of_text|>` does not end there. Only `encode_special`, for the output of chat templates, reads
them as tokens.

`ByteTokenizer` needs no file and suits tests. `TiktokenTokenizer` reads tiktoken files, such as
Llama 3's `tokenizer.model` and the built-in `bpe_2048` (made by `torchtitan tokenizer`, for
small models). `hf_tokenizer.py` reads `tokenizer.json`. The packages that encode are imported
when such a tokenizer is built; neither needs the network, nor runs code of the model's author.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.data.files import user_path
from torchtitan.data.text import END_OF_TEXT, Encoded, Ids, any_of, read_file, split_text

BUILT_IN = {"bpe_2048": Path(__file__).parent / "assets" / "bpe_2048.tiktoken"}
BEGIN_OF_TEXT = "<|begin_of_text|>"

# the split pattern of Llama 3 (contractions, words, up to 3 digits, punctuation, white space)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS = 128_000
# tiktoken's regular expressions overflow their stack on a run of about 700,000 spaces
MAX_CHARS = 1 << 16


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
        return TiktokenTokenizer(file)
    from torchtitan.data.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(file)


def find_tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer, or None if this machine does not have its file."""
    exists = path == "byte" or BUILT_IN.get(path, Path(path).expanduser()).exists()
    return build_tokenizer(path) if exists else None


def check_vocabulary(tokenizer: Tokenizer, *, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id without an embedding in the model."""
    if tokenizer.vocab_size > model_vocab_size:
        rule = (
            f"the tokenizer's vocabulary must fit the model's: it has {tokenizer.vocab_size} ids, "
            f"the model {model_vocab_size}; raise vocab_size (docs/lora.md), or choose another "
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
        return [encode_with_special(text, self, num_bytes=lambda _: 1) for text in texts]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD."""
        special = {i: name.encode() for name, i in self.special_tokens.items()}
        parts = (bytes([i]) if 0 <= i < 256 else special.get(i, b"\xff") for i in ids)
        return b"".join(parts).decode(errors="replace")


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

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Special tokens written in it are plain text."""
        ids: list[int] = self._encode_array(text).tolist()
        return ids

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with names of special tokens encoded as their ids."""
        token = self._encoding.decode_single_token_bytes
        return [
            encode_with_special(text, self, num_bytes=lambda i: len(token(i))) for text in texts
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
    for number, line in enumerate(read_file(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            is_valid = int(rank) == len(ranks) and token and token not in ranks
        except (ValueError, binascii.Error):
            is_valid = False
        if not is_valid:
            raise DataError(
                f"line {number} of tokenizer file {file} must be a new token in base64 and the "
                f"rank {len(ranks)}, got {line[:60]!r}; the file is damaged or not a tiktoken "
                f"file (of a SentencePiece model use its tokenizer.json)"
            )
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"tokenizer file {file} must hold all 256 single bytes, {len(missing)} are missing "
            f"(the first is {missing[0]}); the file is cut short or not in tiktoken format"
        )
    return ranks


def _llama3_special_tokens() -> list[str]:
    """Return the names of Llama 3's ids 128,000 to 128,255."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(251)]
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    names = [BEGIN_OF_TEXT, END_OF_TEXT, *reserved[:4], *headers]
    return [*names, reserved[4], "<|eot_id|>", *reserved[5:]]


def encode_with_special(
    text: str, tokenizer: Tokenizer, *, num_bytes: Callable[[int], int]
) -> Encoded:
    """Return the ids of `text`, with names of special tokens encoded as their ids.

    `num_bytes` returns the number of UTF-8 bytes of an id.
    """
    special = tokenizer.special_tokens
    ids: list[int] = []
    sizes: list[int] = []
    for piece in re.split(f"({any_of(special)})", text):
        if piece in special:
            ids.append(special[piece])
            sizes.append(len(piece.encode()))
        else:
            ids += (plain := tokenizer.encode(piece))
            sizes += map(num_bytes, plain)
    data = np.frombuffer(text.encode(), np.uint8)
    # number of characters up to each byte: the first byte of a character is not 0b10xxxxxx
    characters = np.cumsum((data & 0xC0) != 0x80)
    return Encoded(ids, characters[np.cumsum(sizes, dtype=np.int64) - 1].tolist())

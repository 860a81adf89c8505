"""Text to token ids and back.

A tokenizer maps text to ids and back, names the id that ends a document, and has a fingerprint of
everything that decides the ids, which tokenized data and checkpoints store. Special tokens written
in a text are plain text: a document that contains `<|end_of_text|>` does not end there. Only
`encode_special`, for the output of chat templates, reads them as tokens.

Three kinds are read: `byte`, tiktoken files (Llama 3's `tokenizer.model`, the built-in `bpe_2048`)
and Hugging Face's `tokenizer.json`. None needs the network, or runs code of the model's author.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.files import check_is_file, user_path
from torchtitan.data.text import Ids, any_of, check_fetched, split_text

BUILT_IN = {"bpe_2048": Path(__file__).parent / "assets" / "bpe_2048.tiktoken"}
BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
KNOWN_END_TOKENS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# the split pattern of Llama 3 (contractions, words, up to 3 digits, punctuation, white space)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS = 128_000
MAX_CHARS = 1 << 16
"""Characters that tiktoken gets at once: its regular expressions overflow their stack on a run of
about 700,000 spaces."""


class Encoded(NamedTuple):
    """Ids of a text, and the position after the last character that each covers, even in part."""

    ids: Sequence[int]
    ends: Sequence[int]


class Tokenizer:
    """The interface that data and generation use, implemented for tokens that are bytes."""

    vocab_size: int
    """One more than the largest id."""
    eos_id: int
    """The id that follows each document."""
    fingerprint: str
    """SHA-256 of everything that decides the ids of a text."""
    special_tokens: Mapping[str, int]
    """Ids of the special tokens by name."""
    begin_ids: Sequence[int] = ()
    """Ids that inference puts before a text, often none or a begin token."""
    encodes_pieces: bool = True
    """Whether the pieces of `split_text` get the ids of the full text."""

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes of an id; 0xff, which no text contains, for an unknown one."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without special tokens. Other threads may run."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without begin and end tokens."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with names of special tokens encoded as their ids."""
        return [self._encode_special(text) for text in texts]

    def _encode_special(self, text: str) -> Encoded:
        ids: list[int] = []
        for piece in re.split(f"({any_of(self.special_tokens)})", text):
            ids += (
                [self.special_tokens[piece]] if piece in self.special_tokens else self.encode(piece)
            )
        data = np.frombuffer(text.encode(), np.uint8)
        # number of characters up to each byte: the first byte of a character is not 0b10xxxxxx
        characters = np.cumsum((data & 0xC0) != 0x80)
        sizes = [len(self.token_bytes(i)) for i in ids]
        return Encoded(ids, characters[np.cumsum(sizes, dtype=np.int64) - 1].tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Cut characters and unknown ids become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


def build_tokenizer(path: str, *, key: str = "model.tokenizer_path") -> Tokenizer:
    """Build the tokenizer that the setting `key` names.

    `byte` and `bpe_2048` are built in. A folder or a `.json` file is read as Hugging Face's, any
    other file as tiktoken's. Raises DataError if the file is missing or damaged, or has no end
    token.
    """
    if path == "byte":
        return ByteTokenizer()
    file = BUILT_IN.get(path) or user_path(path, key=key)
    if file.is_dir():
        file /= "tokenizer.json"
    if not file.exists():
        names = ", ".join(["byte", *BUILT_IN])
        rule = f"must be a tokenizer's file or folder, or one of {names}; {file} does not exist"
        raise DataError.at(key, rule)
    return HuggingFaceTokenizer(file) if file.suffix == ".json" else TiktokenTokenizer(file)


@cache
def _build_once(path: str) -> Tokenizer:
    return build_tokenizer(path)  # reading a large vocabulary takes long


def check_vocabulary(tokenizer: Tokenizer, *, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id without an embedding in the model."""
    if tokenizer.vocab_size > model_vocab_size:
        rule = f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model_vocab_size}"
        raise ConfigError.at(("model.tokenizer_path", "model.vocab_size"), rule)


class ByteTokenizer(Tokenizer):
    """Each UTF-8 byte is its own id; 256 starts and 257 ends a text."""

    vocab_size = 258
    eos_id = 257
    special_tokens: Mapping[str, int] = {BEGIN_OF_TEXT: 256, END_OF_TEXT: 257}
    fingerprint = hashlib.sha256(b"utf-8 bytes, begin 256, end 257").hexdigest()
    _names: Mapping[int, bytes] = {256: BEGIN_OF_TEXT.encode(), 257: END_OF_TEXT.encode()}

    def token_bytes(self, i: int) -> bytes:
        """Return the byte of an id, or the name of a special token."""
        return bytes([i]) if 0 <= i < 256 else self._names.get(i, b"\xff")

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class TiktokenTokenizer(Tokenizer):
    """A byte-pair tokenizer read from a tiktoken file: one `base64(token) rank` per line.

    The file holds only byte strings in order of merging; the split pattern and the special tokens
    are conventions. Every file is read with Llama 3's pattern. A file of exactly 128,000 ranks is
    Llama 3's and gets its 256 special tokens; any other file gets a begin and an end token after
    its ranks. tiktoken encodes five times as fast as `tokenizers`.
    """

    def __init__(self, file: Path) -> None:
        import tiktoken

        ranks = read_ranks(file)
        is_llama3 = len(ranks) == LLAMA3_RANKS
        names = _llama3_special_tokens() if is_llama3 else [BEGIN_OF_TEXT, END_OF_TEXT]
        self._file = file
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
        return _build_once, (str(self._file),)

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes of an id."""
        if not 0 <= i < self.vocab_size:
            return b"\xff"
        token: bytes = self._encoding.decode_single_token_bytes(i)
        return token

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text. tiktoken releases the interpreter lock meanwhile."""
        # not encode_to_numpy, which is faster: before tiktoken 0.11 it read special tokens in text
        encode, empty = self._encoding.encode_ordinary, [np.empty(0, np.uint32)]
        return [
            np.concatenate(
                empty + [np.array(encode(p), np.uint32) for p in split_text(text, limit=MAX_CHARS)]
            )
            for text in texts
        ]


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks of a tiktoken file by token."""
    try:
        pairs = [line.split() for line in _read_file(file).splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        rule = f"{file} must be a tiktoken file, with a token in base64 and its rank per line"
        raise DataError(f"{rule}: {error}") from error
    if [*ranks.values()] != [*range(len(pairs))]:
        raise DataError(f"tokenizer file {file} must hold each token once, in the order of ranks")
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise DataError(f"tokenizer file {file} must hold all 256 single bytes")
    return ranks


def _llama3_special_tokens() -> list[str]:
    """Return the names of Llama 3's ids 128,000 to 128,255."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(251)]
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    names = [BEGIN_OF_TEXT, END_OF_TEXT, *reserved[:4], *headers]
    return [*names, reserved[4], "<|eot_id|>", *reserved[5:]]


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer read from a `tokenizer.json` by the package `tokenizers`.

    The end token comes from the `tokenizer_config.json` beside it. Without one, the names that
    known models use are tried.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._content = file, _read_file(file)
        self._config = read_tokenizer_config(file.with_name("tokenizer_config.json"))
        self._tokenizer = self._load(reads_special=False)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: i for i, token in added if token.special}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        names = [special_token(self._config, "eos_token"), *KNOWN_END_TOKENS]
        ends = [vocabulary[name] for name in names if name in vocabulary]
        if not ends:
            raise DataError(
                f"{file} has none of the end tokens {', '.join(KNOWN_END_TOKENS)}; name one of its "
                f"tokens as eos_token in a tokenizer_config.json beside it"
            )
        self.eos_id = ends[0]
        decides = self._content + f"{self.eos_id}{self._beside}".encode()
        self.fingerprint = hashlib.sha256(decides).hexdigest()
        pieces = ("one", " two\n", "three")
        self.begin_ids, self.encodes_pieces = [], False
        with suppress(DataError):  # words that it does not know, and no token for unknown ones
            first, *others = (self.encode(piece) for piece in pieces)
            with_begin = self._tokenizer.encode(pieces[0]).ids  # the post-processor's
            self.begin_ids = with_begin[: with_begin.index(first[0])] if first else []
            # some put a space before every text that they are given, so also before every piece
            self.encodes_pieces = self.encode("".join(pieces)) == sum(others, first)

    def __reduce__(self) -> tuple[object, ...]:
        return _build_once, (str(self._file),)

    def _load(self, *, reads_special: bool) -> Any:
        import tokenizers

        with _panic_as_data_error(f"{self._file} must be a valid tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(self._content.decode())
            # truncation and padding stored in the file would lose text or add tokens
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = not reads_special
            # older folders state tokens beside tokenizer.json, as transformers reads them
            stated, self._beside = self._config.get("added_tokens_decoder") or {}, ""
            for number, token in sorted(stated.items(), key=lambda item: int(item[0])):
                if tokenizer.token_to_id(token["content"]) is None:
                    flags = {flag: token[flag] for flag in TOKEN_FLAGS if flag in token}
                    self._beside += f"{number} {token['content']} {flags}"
                    tokenizer.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        return tokenizer

    @cached_property
    def _special_tokenizer(self) -> Any:
        # a second one, because switching the first fails while another thread encodes
        return self._load(reads_special=True)

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with names of special tokens encoded as their ids."""
        tokenizer = self._special_tokenizer
        with _panic_as_data_error(f"the tokenizer {self._file} fails on a text"):
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        # only the ends: byte-level tokenizers start a token after its leading space
        return [Encoded(e.ids, [end for _, end in e.offsets]) for e in encodings]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, encoded by the threads of `tokenizers`."""
        with _panic_as_data_error(f"the tokenizer {self._file} fails on a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Cut characters become U+FFFD, unknown ids are skipped."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


@contextmanager
def _panic_as_data_error(rule: str) -> Iterator[None]:
    """Raise the errors of `tokenizers` as DataError. A panic in Rust is a BaseException."""
    try:
        yield
    except BaseException as error:
        # another BaseException is a signal's, or the end of the process
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{rule}: {error}") from error


def read_tokenizer_config(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json, empty if it does not exist."""
    if not file.exists():
        return {}
    try:
        config = json.loads(_read_file(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def special_token(config: Mapping[str, Any], role: str) -> str | None:
    """Return the token that a tokenizer_config.json has for a role such as `eos_token`."""
    token = config.get(role)
    # the token, or a description that holds it
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read_file(file: Path) -> bytes:
    try:
        check_is_file(file)
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read tokenizer file {file}: {error.strerror}") from error
    check_fetched(file, data)
    return data

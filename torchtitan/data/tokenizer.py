"""Text to token ids and back: one protocol and three implementations.

A tokenizer maps text to ids and back, names the id that ends a document, and has a fingerprint of
everything that decides the ids, which tokenized data and checkpoints store. It knows nothing of
batches, padding or chats. Special tokens written in a text are plain text: a document that contains
`<|end_of_text|>` does not end there. Only `encode_special`, for the output of chat templates, reads
them as tokens.

`ByteTokenizer` needs no file and suits tests. `TiktokenTokenizer` reads tiktoken files, such as
Llama 3's `tokenizer.model` and the built-in `bpe_2048` (made by `scripts/train_tokenizer.py`, for
small models). `HuggingFaceTokenizer` reads `tokenizer.json`. The packages that encode are imported
when such a tokenizer is built; neither needs the network, nor runs code of the model's author.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.files import check_is_file
from torchtitan.data.files import user_path
from torchtitan.data.text import any_of, check_fetched, split_text

logger = logging.getLogger(__name__)
Ids = npt.NDArray[np.uint32]

BUILT_IN = {"bpe_2048": Path(__file__).parent / "assets" / "bpe_2048.tiktoken"}
MAX_FILE_BYTES = 1 << 28
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_IDS = 1 << 30  # a token store can hold twice an id
BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
KNOWN_END_TOKENS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")

# the split pattern of Llama 3 (contractions, words, up to 3 digits, punctuation, white space)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS = 128_000
# tiktoken's regular expressions overflow their stack on a run of about 700,000 spaces
MAX_CHARS = 1 << 16


class Encoded(NamedTuple):
    """Ids of a text, and the position after the last character that each covers, even in part."""

    ids: Sequence[int]
    ends: Sequence[int]


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
        if not (file / "tokenizer.json").exists():
            rule = f"the folder {path!r} has no tokenizer.json; name one, or a tiktoken file"
            raise DataError.at(key, rule)
        return HuggingFaceTokenizer(file / "tokenizer.json")
    return HuggingFaceTokenizer(file) if file.suffix == ".json" else TiktokenTokenizer(file)


def find_tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer, or None if this machine does not have its file."""
    exists = path == "byte" or BUILT_IN.get(path, Path(path).expanduser()).exists()
    return build_tokenizer(path) if exists else None


def check_vocabulary(tokenizer: Tokenizer, *, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id without an embedding in the model."""
    if tokenizer.vocab_size > model_vocab_size:
        rule = (
            f"the tokenizer's vocabulary must fit the model's: it has {tokenizer.vocab_size} ids, "
            f"the model {model_vocab_size}; raise vocab_size (docs/adapt.md), or choose another "
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
    for number, line in enumerate(_read_bytes(file).splitlines(), start=1):
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


class HuggingFaceTokenizer:
    """A tokenizer read from a `tokenizer.json` by the package `tokenizers` (the `hf` extra).

    The end token comes from the `tokenizer_config.json` beside it. Without one, the names that
    known models use are tried. Some damaged files make the package panic, which raises DataError
    too. Nothing limits the time that the file's regular expressions take.
    """

    def __init__(self, file: Path) -> None:
        if find_spec("tokenizers") is None:
            raise DataError(
                f"reading {file} needs the package 'tokenizers'; "
                f"install it, in the repository, with: pip install -e '.[hf]'"
            )
        self._file, self._content = file, _read_bytes(file)
        self._config = read_tokenizer_config(file.with_name("tokenizer_config.json"))
        self._tokenizer = self._load(reads_special=False)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: i for i, token in added if token.special}
        # ids may have gaps
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_IDS:
            raise DataError(f"ids must be below {MAX_IDS}, {file} has {self.vocab_size - 1}")
        self.eos_id = vocabulary[_find_end_token(file, vocabulary, config=self._config)]
        decides = self._content + f"{self.eos_id}{self._beside}".encode()
        self.fingerprint = hashlib.sha256(decides).hexdigest()
        self.begin_ids: list[int] = []
        self.encodes_pieces = False
        pieces = ("one", " two\n", "three")
        with suppress(DataError):  # words that it does not know, and no token for unknown ones
            plain, whole = self.encode(pieces[0]), self._tokenizer.encode(pieces[0]).ids
            self.begin_ids = whole[: whole.index(plain[0])] if plain else []  # post-processor's
            # some put a space before every text that they are given, so also before every piece
            parts = [i for piece in pieces for i in self.encode(piece)]
            self.encodes_pieces = self.encode("".join(pieces)) == parts

    def _load(self, *, reads_special: bool) -> Any:
        import tokenizers

        with _panic_as_data_error(f"{self._file} must be a valid tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(self._content.decode())
            # truncation and padding stored in the file would lose text or add tokens
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = not reads_special
        # older folders state tokens beside tokenizer.json, as transformers reads them
        stated, self._beside = self._config.get("added_tokens_decoder"), ""
        for i, token in sorted(stated.items(), key=_number) if isinstance(stated, dict) else []:
            text = token.get("content") if isinstance(token, dict) else None
            if not isinstance(text, str) or tokenizer.token_to_id(text) is not None:
                continue
            flags = {flag: token[flag] for flag in TOKEN_FLAGS if isinstance(token.get(flag), bool)}
            self._beside += f"{i} {text} {flags}"
            tokenizer.add_tokens([tokenizers.AddedToken(text, **flags)])
            given = tokenizer.token_to_id(text)
            if given != _number((i, token)) and not reads_special:
                logger.warning(
                    "%s: %.60r has id %d, as in transformers; tokenizer_config.json states %.20r",
                    self._file,
                    text,
                    given,
                    i,
                )
        return tokenizer

    @cached_property
    def _special_tokenizer(self) -> Any:
        # a second one, because switching the first fails while another thread encodes
        return self._load(reads_special=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Special tokens written in it are plain text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with names of special tokens encoded as their ids."""
        tokenizer = self._special_tokenizer
        with _panic_as_data_error(f"the tokenizer {self._file} fails on a text"):
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        # only the ends: byte-level tokenizers start a token after its leading space
        return [Encoded(each.ids, [end for _, end in each.offsets]) for each in encodings]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, encoded by the threads of `tokenizers`."""
        with _panic_as_data_error(f"the tokenizer {self._file} fails on a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Cut characters become U+FFFD, unknown ids are skipped."""
        known = [i for i in ids if self._tokenizer.id_to_token(i) is not None]
        with _panic_as_data_error(f"the tokenizer {self._file} fails on ids"):
            text: str = self._tokenizer.decode(known, skip_special_tokens=False)
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


def _number(item: tuple[str, object]) -> int:
    return int(item[0]) if item[0].isdecimal() and len(item[0]) < 10 else -1


def _find_end_token(file: Path, vocabulary: dict[str, int], *, config: Mapping[str, Any]) -> str:
    for name in (special_token(config, "eos_token"), *KNOWN_END_TOKENS):
        if name in vocabulary:
            return name
    raise DataError(
        f"cannot find which token of {file} ends a document: it has none of "
        f"{', '.join(KNOWN_END_TOKENS)}; name one of its tokens as eos_token in a "
        f"tokenizer_config.json beside it"
    )


def read_tokenizer_config(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json, empty if it does not exist."""
    if not file.exists():
        return {}
    try:
        config = json.loads(_read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def special_token(config: Mapping[str, Any], role: str) -> str | None:
    """Return the token that a tokenizer_config.json has for a role such as `eos_token`."""
    token = config.get(role)
    # the token, or a description that holds it
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


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


def _read_bytes(file: Path) -> bytes:
    try:
        check_is_file(file)
        if file.stat().st_size > MAX_FILE_BYTES:
            raise DataError(
                f"a tokenizer file must have at most {MAX_FILE_BYTES >> 20} MiB: {file}"
            )
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read tokenizer file {file}: {error.strerror}") from error
    check_fetched(file, data)
    return data

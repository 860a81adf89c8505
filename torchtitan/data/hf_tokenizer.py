"""Tokenizers of Hugging Face: `tokenizer.json`, and the `tokenizer_config.json` beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.data.text import END_OF_TEXT, Encoded, Ids, read_file

TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
KNOWN_END_TOKENS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


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
        self._file, self._content = file, read_file(file)
        self._config = read_tokenizer_config(file.with_name("tokenizer_config.json"))
        self._tokenizer = self._load(reads_special=False)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: i for i, token in added if token.special}
        # ids may have gaps
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
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
        return tokenizer

    @cached_property
    def _special_tokenizer(self) -> Any:
        # a second one, because switching the first fails while another thread encodes
        return self._load(reads_special=True)

    def __reduce__(self) -> tuple[object, ...]:
        from torchtitan.data.tokenizer import build_cached

        return build_cached, (str(self._file),)

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
        config = json.loads(read_file(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def special_token(config: Mapping[str, Any], role: str) -> str | None:
    """Return the token that a tokenizer_config.json has for a role such as `eos_token`."""
    token = config.get(role)
    # the token, or a description that holds it
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None

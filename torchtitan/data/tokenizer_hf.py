"""Hugging Face tokenizers: `tokenizer.json`, alone or in a model's folder.

The `tokenizers` library (the `hf` extra) reads the JSON file, needs no network and runs no code of
the model's author. But the file's regular expressions may run forever, and some files make the
library panic, so it runs in a child process (`foreign.py`).

The file does not say which token ends a document. `tokenizer_config.json` beside it does. Without
that, the names that known models use are tried; if there is none of them, it is an error.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.data.foreign import ForeignError, Limits, Loaded, Program
from torchtitan.data.text import END_OF_TEXT, Encoded, Ids, read_bytes

# a slow tokenizer encodes a million characters per second
LIMITS = Limits(seconds=30, gib=16)
SECONDS_PER_CHAR = 1e-4
MOST_IDS = 2**30  # twice an id fits a token store
KNOWN_END_TOKENS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


def load_tokenizer(source: bytes) -> Loaded:
    """Return a function that calls a method below by name, and the names of the ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(source.decode())
    # truncation and padding stored in the file would lose text or add tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # special tokens spelt in a document are plain text
    tokenizer.encode_special_tokens = True

    def encode_batch(texts: list[str]) -> list[Ids]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # no offsets
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_special(texts: list[str]) -> list[Encoded]:
        tokenizer.encode_special_tokens = False
        try:
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        finally:
            tokenizer.encode_special_tokens = True
        # only the ends: byte-level tokenizers begin a token after its leading space
        return [Encoded(each.ids, [end for _, end in each.offsets]) for each in encodings]

    def decode(ids: list[int]) -> str:
        known = [i for i in ids if tokenizer.id_to_token(i) is not None]
        text: str = tokenizer.decode(known, skip_special_tokens=False)
        return text

    methods: dict[str, Callable[[Any], Any]] = {
        "encode_batch": encode_batch,
        "encode_special": encode_special,
        "decode": decode,
    }
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder().items()
    special = {token.content: i for i, token in added if token.special}
    return lambda call: methods[call[0]](call[1]), (vocabulary, special)


class HuggingFaceTokenizer:
    """Any tokenizer that the `tokenizers` library can read, in a child process."""

    def __init__(self, path: Path) -> None:
        if find_spec("tokenizers") is None:
            raise DataError(
                f"reading {path} needs the package 'tokenizers'; "
                f"install it, in the repository, with: pip install -e '.[hf]'"
            )
        self._turn = threading.Lock()
        self._waiting: deque[tuple[Sequence[str], Future[list[Ids]]]] = deque()
        self._file = file = path / "tokenizer.json" if path.is_dir() else path
        text = read_bytes(file)
        try:
            self._program = Program(f"{__name__}:load_tokenizer", text, limits=LIMITS)
        except ForeignError as error:
            raise DataError(f"{file} must be a valid tokenizer.json: {error}") from error
        vocabulary, self.special_tokens = self._program.about
        # ids may have gaps
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(f"ids must be below {MOST_IDS}, {file} has {self.vocab_size - 1}")
        self.eos_id = vocabulary[end_token(file, vocabulary)]
        self.fingerprint = hashlib.sha256(text + str(self.eos_id).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens spelt in it are plain text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, with the names of special tokens as their ids."""
        encoded: list[Encoded] = self._call("encode_special", list(texts), texts)
        return encoded

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, encoded by the library's own threads.

        All threads share one child, so it gets the texts of all waiting threads at once: the
        library divides several texts among cores, but not one long text.
        """
        mine: Future[list[Ids]] = Future()
        self._waiting.append((texts, mine))
        with self._turn:
            if not mine.done():
                jobs = [self._waiting.popleft() for _ in range(len(self._waiting))]
                together = [text for each, _ in jobs for text in each]
                try:
                    ids = iter(self._call("encode_batch", together, together))
                except BaseException as error:
                    for _, job in jobs:
                        job.set_exception(error)
                    raise
                for each, job in jobs:
                    job.set_result([*islice(ids, len(each))])
        return mine.result()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; cut characters become U+FFFD, and unknown ids are left out."""
        text: str = self._call("decode", list(ids), [])
        return text

    def _call(self, method: str, argument: object, texts: Sequence[str]) -> Any:
        """Return the library's result; raise DataError that names the first text that fails."""
        seconds = LIMITS.seconds + SECONDS_PER_CHAR * sum(map(len, texts))
        try:
            (result,) = self._program.run([(method, argument)], seconds=seconds)
        except ForeignError as error:
            if len(texts) > 1:
                return [self._call(method, [text], [text])[0] for text in texts]
            what = f"the text that begins {texts[0][:60]!r}" if texts else f"ids {argument!r:.60}"
            raise DataError(
                f"the tokenizer {self._file} fails on {what}: {error}; use another tokenizer, or "
                f"leave that text out"
            ) from error
        return result


def read_config(file: Path) -> dict[str, Any]:
    """Return a tokenizer_config.json; empty if there is none. Raise DataError if it is not JSON."""
    if not file.exists():
        return {}
    try:
        config = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def token_of(config: dict[str, Any], role: str) -> str | None:
    """Return the token of a role such as `eos_token`, if the config has one."""
    token = config.get(role)
    # the token, or a description that holds it
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def end_token(file: Path, vocabulary: dict[str, int]) -> str:
    """Return the name of the token that ends a document; raise DataError if it is not known."""
    config = read_config(file.with_name("tokenizer_config.json"))
    for name in (token_of(config, "eos_token"), *KNOWN_END_TOKENS):
        if name in vocabulary:
            return name
    raise DataError(
        f"cannot tell which token of {file} ends a document: it has none of "
        f"{', '.join(KNOWN_END_TOKENS)}; name one of its tokens as eos_token in a "
        f"tokenizer_config.json beside it"
    )

"""Hugging Face tokenizers: `tokenizer.json`, alone or in a model's folder.

Only the `tokenizers` library is used (the `hf` extra), never `transformers`: it reads the one JSON
file, needs no network and runs no code of the model's author. But its regular expressions may run
for ever, and some files make the library panic, so it works in a child process (`foreign.py`).

The file does not say which token ends a document. `tokenizer_config.json` beside it does; without
it, the names that known models use are tried, and an unknown one is an error rather than a guess.
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

# a slow tokenizer encodes a million characters in a second
LIMITS = Limits(seconds=30, gib=16)
SECONDS_PER_CHAR = 1e-4
MOST_IDS = 2**30  # twice an id fits a token store
KNOWN_END_TOKENS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


def load_tokenizer(source: bytes) -> Loaded:
    """Return what calls a method below, given its name and argument, and the names of the ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(source.decode())
    # truncation and padding stored in the file would lose text or add tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # special tokens spelt in a document are plain text
    tokenizer.encode_special_tokens = True

    def encode_batch(texts: list[str]) -> list[Ids]:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_special(texts: list[str]) -> list[Encoded]:
        tokenizer.encode_special_tokens = False
        try:
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        finally:
            tokenizer.encode_special_tokens = True
        # where they begin is not taken: byte-level tokenizers leave leading spaces out of it
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
    """A tokenizer of any kind that the `tokenizers` library can read, in a child process."""

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
            raise DataError(f"{file} is no tokenizer.json that can be read: {error}") from error
        vocabulary, self.special_tokens = self._program.about
        # ids may have gaps, so that counting them is not enough
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(f"{file} has the id {self.vocab_size - 1}, at most {MOST_IDS - 1} fits")
        self.eos_id = vocabulary[end_token(file, vocabulary)]
        self.fingerprint = hashlib.sha256(text + str(self.eos_id).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens spelt in it are plain text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_special(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the ids of each text, in which the names of special tokens stand for these."""
        encoded: list[Encoded] = self._call("encode_special", list(texts), texts)
        return encoded

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, encoded by the library's own threads.

        There is one child, so texts of threads that wait for it are sent together: the library
        divides them among cores, which it cannot do with a single long one.
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
        """Return the text of `ids`; cut characters become U+FFFD, unknown ids are left out."""
        text: str = self._call("decode", list(ids), [])
        return text

    def _call(self, method: str, argument: object, texts: Sequence[str]) -> Any:
        """Return what the library gives; raise DataError that names the first text it fails on."""
        seconds = LIMITS.seconds + SECONDS_PER_CHAR * sum(map(len, texts))
        try:
            (result,) = self._program.run([(method, argument)], seconds=seconds)
        except ForeignError as error:
            if len(texts) > 1:
                return [self._call(method, [text], [text])[0] for text in texts]
            what = f"the text that begins {texts[0][:60]!r}" if texts else f"ids {argument!r:.60}"
            raise DataError(
                f"the tokenizer {self._file} fails on {what}: {error}; take another tokenizer, or "
                f"leave that out"
            ) from error
        return result


def end_token(file: Path, vocabulary: dict[str, int]) -> str:
    """Return the name of the token that ends a document; raise DataError if none can be told."""
    config_file = file.with_name("tokenizer_config.json")
    if config_file.exists():
        try:
            config: Any = json.loads(read_bytes(config_file))
        except (ValueError, RecursionError) as error:
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

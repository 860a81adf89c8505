"""Text that needs no download: the standard library's sources, and generated sentences.

`python_stdlib` is real text that every machine with Python has: about 12 MB of code, comments and
documentation, enough to see a small model learn. It differs between Python versions. `synthetic`
is the same text everywhere, to compare runs of different machines and to test: sentences of a small
made-up language whose next word depends on the last one, so that a model can learn much of it. A
part of it is held out: more sentences of that language, to validate on and never to train on.
"""

from __future__ import annotations

import logging
import os
import random
import sysconfig
import tokenize
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from torchtitan.base.errors import DataError
from torchtitan.data.parts import Advance
from torchtitan.data.source import Files, Piece

logger = logging.getLogger(__name__)

# tests are large and odd; installed packages are not the standard library
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class StdlibCorpus(Files):
    """The `.py` files of the running Python's standard library, sorted by path."""

    def __init__(self) -> None:
        super().__init__(stdlib_files())

    @property
    def name(self) -> str:
        """Return its name for messages."""
        return "python_stdlib"

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Yield each file as a document, without those whose declared encoding is wrong."""
        for file in self.files:
            try:
                with tokenize.open(file) as handle:
                    text = handle.read()
            except (SyntaxError, UnicodeDecodeError) as error:
                logger.info("%s is left out: %s", file, error)
                text = ""
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from error
            advance(file.stat().st_size)
            if text:
                yield Piece(text, ends_document=True, where=str(file))


def stdlib_files() -> list[Path]:
    """Return the files; raise DataError if this Python has none, as when they are zipped."""
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]  # it enters no other
        # _sysconfigdata holds the paths of the machine that built this Python
        kept += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    files = sorted(filter(Path.is_file, kept), key=Path.as_posix)
    if not files:
        rule = (
            f"'python_stdlib' needs the sources of the standard library, {root} holds none; "
            f"use 'synthetic', or 'files' with dataset_path"
        )
        raise DataError.at("dataset", rule)
    return files


class SyntheticCorpus:
    """A million characters of a made-up language with 256 words, the same on every machine.

    Only `Random.random()` is used: Python promises its values across versions, and no others.
    """

    num_words = 256
    num_followers = 8

    def __init__(self, *, held_out: bool = False) -> None:
        """`held_out`: other sentences, a twentieth of the length."""
        self._held_out = held_out
        self.name = "synthetic, held out" if held_out else "synthetic"
        self.num_bytes = 50_000 if held_out else 1_000_000

    def identity(self) -> list[str]:
        """Return the version of the language."""
        return ["synthetic held out 1" if self._held_out else "synthetic 1"]

    def pieces(self, advance: Advance) -> Iterator[Piece]:
        """Yield documents of 1 to 20 sentences until there are `num_bytes` characters."""
        draw = random.Random(20).random
        words = self.words()
        followers = [
            [int(draw() * self.num_words) for _ in range(self.num_followers)] for _ in words
        ]
        # Zipf's law: the first follower is the likeliest
        odds = list(accumulate(1 / (rank + 1) for rank in range(self.num_followers)))
        if self._held_out:
            draw = random.Random(22).random
        done, number = 0, 0
        while done < self.num_bytes:
            sentences = []
            for _ in range(1 + int(draw() * 20)):
                word = int(draw() * self.num_words)
                sentence = [words[word].capitalize()]
                for _ in range(3 + int(draw() * 12)):
                    word = followers[word][bisect(odds, draw() * odds[-1])]
                    sentence.append(words[word])
                sentences.append(" ".join(sentence) + ".")
            text = " ".join(sentences) + "\n"
            done += len(text)
            number += 1
            advance(len(text))
            yield Piece(text, ends_document=True, where=f"{self.name} document {number}")

    def words(self) -> list[str]:
        """Return the words of the language, all different."""
        draw = random.Random(19).random
        words: dict[str, None] = {}
        while len(words) < self.num_words:
            syllables = 1 + int(draw() * 3)
            letters = (
                "bdfgklmnprstvz"[int(draw() * 14)] + "aeiou"[int(draw() * 5)]
                for _ in range(syllables)
            )
            words["".join(letters)] = None
        return list(words)

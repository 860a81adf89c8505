"""Generated text: sentences of a made-up language, the same on every machine.

The next word depends on the last one, so that a model can learn much of it. More sentences of the
language are held out, to validate on.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate

from torchtitan.data.text import Piece


class SyntheticCorpus:
    """A million characters of a made-up language with 256 words, the same on every machine.

    Only `Random.random()` is used: Python promises its values across versions, and no others.

    Args:
        held_out: Generate other sentences of the language, a twentieth of the length.
    """

    num_words = 256
    num_followers = 8

    def __init__(self, *, held_out: bool = False) -> None:
        self._held_out = held_out
        self.name = "synthetic, held out" if held_out else "synthetic"
        self.num_bytes = 50_000 if held_out else 1_000_000

    def identity(self) -> list[str]:
        """Return the version of the language."""
        return ["synthetic held out 1" if self._held_out else "synthetic 1"]

    def pieces(self) -> Iterator[Piece]:
        """Yield documents of 1 to 20 sentences up to `num_bytes` characters."""
        draw = random.Random(20).random
        words = self.words()
        followers = [
            [int(draw() * self.num_words) for _ in range(self.num_followers)] for _ in words
        ]
        # Zipf's law: the first follower is the likeliest
        odds = list(accumulate(1 / (rank + 1) for rank in range(self.num_followers)))
        if self._held_out:
            draw = random.Random(22).random
        num_chars, number = 0, 0
        while num_chars < self.num_bytes:
            sentences = []
            for _ in range(1 + int(draw() * 20)):
                word = int(draw() * self.num_words)
                sentence = [words[word].capitalize()]
                for _ in range(3 + int(draw() * 12)):
                    word = followers[word][bisect(odds, draw() * odds[-1])]
                    sentence.append(words[word])
                sentences.append(" ".join(sentence) + ".")
            text = " ".join(sentences) + "\n"
            num_chars += len(text)
            number += 1
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

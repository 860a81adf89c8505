"""Generated text: sentences of a made-up language, the same on every machine.

The next word depends on the last one, so that a model can learn much of it. More sentences of the
language are held out, to validate on.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

from torchtitan.data.corpus import Corpus
from torchtitan.data.dataset import IGNORED, Dataset
from torchtitan.data.loader import Samples
from torchtitan.data.text import Piece

NUM_WORDS, NUM_FOLLOWERS = 256, 8
NUM_CHARS = {False: 1_000_000, True: 50_000}


def synthetic_corpus(*, held_out: bool = False) -> Corpus:
    """Return a million characters of a made-up language, the same on every machine.

    With `held_out` other sentences of the language, a twentieth of the length.
    """
    name = "synthetic, held out" if held_out else "synthetic"
    version = "synthetic held out 1" if held_out else "synthetic 1"
    return Corpus(name, partial(_documents, name, held_out), key=[version])


def _documents(name: str, held_out: bool) -> Iterator[Piece]:
    """Yield documents of 1 to 20 sentences.

    Only `Random.random()` is used: Python promises its values across versions, and no others.
    """
    draw = random.Random(20).random
    words = make_words()
    followers = [[int(draw() * NUM_WORDS) for _ in range(NUM_FOLLOWERS)] for _ in words]
    # Zipf's law: the first follower is the likeliest
    odds = list(accumulate(1 / (rank + 1) for rank in range(NUM_FOLLOWERS)))
    if held_out:
        draw = random.Random(22).random
    num_chars, number = 0, 0
    while num_chars < NUM_CHARS[held_out]:
        sentences = []
        for _ in range(1 + int(draw() * 20)):
            word = int(draw() * NUM_WORDS)
            sentence = [words[word].capitalize()]
            for _ in range(3 + int(draw() * 12)):
                word = followers[word][bisect(odds, draw() * odds[-1])]
                sentence.append(words[word])
            sentences.append(" ".join(sentence) + ".")
        text = " ".join(sentences) + "\n"
        num_chars += len(text)
        number += 1
        yield Piece(text, ends_document=True, where=f"{name} document {number}")


def make_words() -> list[str]:
    """Return the words of the language, all different."""
    draw = random.Random(19).random
    words: dict[str, None] = {}
    while len(words) < NUM_WORDS:
        syllables = 1 + int(draw() * 3)
        letters = (
            "bdfgklmnprstvz"[int(draw() * 14)] + "aeiou"[int(draw() * 5)] for _ in range(syllables)
        )
        words["".join(letters)] = None
    return list(words)


class MaskedDataset(Dataset):
    """Keeps the labels of a pseudo-random run in each sample and sets the rest to -100.

    Layouts are compared on it: with equal numbers of labels a wrong divisor would not show.
    """

    def __getitem__(self, k: int) -> Samples:
        sample = super().__getitem__(k)
        labels = sample["labels"].clone()
        first, last = labelled_run(k, seq_len=len(labels), seed=self._seed)
        labels[:first] = IGNORED
        labels[last:] = IGNORED
        return {**sample, "labels": labels}


def labelled_run(k: int, *, seq_len: int, seed: int) -> tuple[int, int]:
    """Return start and end of the labels that sample k keeps: no label, all, or a run."""
    draw = random.Random(f"labels/{seed}/{k}").random
    choice = draw()
    if choice < 1 / 8:
        return 0, 0
    if choice < 1 / 4:
        return 0, seq_len
    length = int(draw() * (seq_len + 1))
    first = int(draw() * (seq_len - length + 1))
    return first, first + length

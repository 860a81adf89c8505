"""Generated examples, to try fine-tuning without a download: `synthetic_examples`.

A thousand examples, the same on every machine, ask which word of the language of `synthetic`
follows which. Three of four are chats of one to four questions, the others prompts with
completions. Each word has one answer, so a small model can learn them all. A hundred more are held
out for validation: the same words in other conversations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torchtitan.data.corpus import SyntheticCorpus
from torchtitan.finetune.shapes import Example, parse_example


class SyntheticExamples:
    """The examples to train on, or those that are held out."""

    num_examples = 1000
    num_held_out = 100

    def __init__(self, *, held_out: bool = False) -> None:
        self._held_out = held_out
        self.name = "synthetic_examples, held out" if held_out else "synthetic_examples"

    def identity(self) -> list[str]:
        """Return the version of the examples."""
        return ["synthetic examples held out 1" if self._held_out else "synthetic examples 1"]

    def examples(self) -> Iterator[Example]:
        """Yield all examples."""
        for number, value in enumerate(self.values(), start=1):
            yield parse_example(value, where=f"{self.name} {number}")

    def values(self) -> Iterator[dict[str, Any]]:
        """Yield each example as the object that a line of a file would hold."""
        trained = self._draw(random.Random(21), num=self.num_examples)
        if not self._held_out:
            yield from trained
            return
        known = [*trained]
        others = self._draw(random.Random(23), num=2 * self.num_held_out)
        yield from islice((value for value in others if value not in known), self.num_held_out)

    def _draw(self, generator: random.Random, *, num: int) -> Iterator[dict[str, Any]]:
        draw = generator.random
        words = SyntheticCorpus().words()
        for number in range(num):
            places = [int(draw() * len(words)) for _ in range(1 + int(draw() * 4))]
            if number % 4 == 3:
                row = [words[(places[0] + i) % len(words)] for i in range(2 + len(places))]
                yield {"prompt": row[0], "completion": " " + " ".join(row[1:])}
                continue
            messages = [{"role": "system", "content": "Say which word follows."}]
            for place in places:
                word, next_word = words[place], words[(place + 1) % len(words)]
                messages += [
                    {"role": "user", "content": f"What follows {word}?"},
                    {"role": "assistant", "content": f"{next_word} follows {word}."},
                ]
            yield {"messages": messages}

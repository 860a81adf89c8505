"""Generated examples, to try fine-tuning without a download: `dataset = "synthetic_examples"`.

A thousand examples, the same on every machine, ask which word of the language of `synthetic`
follows which. Three of four are chats of one to four questions, the rest are prompts with
completions. Each word has one answer, so a small model can learn them all. A hundred examples with
the same words in other conversations are for validation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torchtitan.data.readers import Row
from torchtitan.data.synthetic import SyntheticCorpus


class SyntheticExamples:
    """The examples to train on, or those for validation."""

    num_examples = 1000
    num_held_out = 100

    def __init__(self, *, held_out: bool = False) -> None:
        self._held_out = held_out
        self.name = "synthetic_examples, held out" if held_out else "synthetic_examples"

    def identity(self) -> list[str]:
        """Return the version of the examples."""
        return ["synthetic examples held out 1" if self._held_out else "synthetic examples 1"]

    def rows(self) -> Iterator[Row]:
        """Yield each example as a row of a file."""
        values = self._draw(random.Random(21), num=self.num_examples)
        if self._held_out:
            known = [*values]
            drawn = self._draw(random.Random(23), num=2 * self.num_held_out)
            values = islice((row for row in drawn if row not in known), self.num_held_out)
        for number, value in enumerate(values, start=1):
            yield Row(value, f"{self.name} {number}")

    def _draw(self, generator: random.Random, *, num: int) -> Iterator[dict[str, Any]]:
        draw = generator.random
        words = SyntheticCorpus().words()
        for number in range(num):
            indices = [int(draw() * len(words)) for _ in range(1 + int(draw() * 4))]
            if number % 4 == 3:
                row = [words[(indices[0] + i) % len(words)] for i in range(2 + len(indices))]
                yield {"prompt": row[0], "completion": " " + " ".join(row[1:])}
                continue
            messages = [{"role": "system", "content": "Say which word follows."}]
            for index in indices:
                word, next_word = words[index], words[(index + 1) % len(words)]
                messages += [
                    {"role": "user", "content": f"What follows {word}?"},
                    {"role": "assistant", "content": f"{next_word} follows {word}."},
                ]
            yield {"messages": messages}

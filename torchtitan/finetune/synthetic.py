"""Generated examples, to try fine-tuning without a download: `dataset = "synthetic_examples"`.

A thousand examples, the same on every machine, ask which word of the language of `synthetic`
follows which. Three of four are chats of one to four questions, the rest are prompts with
completions. Each word has one answer, so a small model can learn them all. A hundred examples with
the same words in other conversations are for validation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from torchtitan.data.corpus import Corpus
from torchtitan.data.readers import Row
from torchtitan.data.synthetic import make_words

NUM_EXAMPLES, NUM_HELD_OUT = 1000, 100


def synthetic_examples(*, held_out: bool = False, pairs: bool = False) -> Corpus:
    """Return the examples to train on, or those for validation. Of `pairs` the rejected answer is
    about another word."""
    noun, part = "preferences" if pairs else "examples", " held out" if held_out else ""
    name = f"synthetic_{noun}{',' if held_out else ''}{part}"
    return Corpus(name, partial(_rows, name, held_out, pairs), key=[f"synthetic {noun}{part} 1"])


def _rows(name: str, held_out: bool, pairs: bool) -> Iterator[Row]:
    values = _draw(random.Random(21), num=NUM_EXAMPLES)
    if held_out:
        trained = [*values]
        drawn = _draw(random.Random(23), num=2 * NUM_HELD_OUT)
        values = islice((row for row in drawn if row not in trained), NUM_HELD_OUT)
    for number, value in enumerate(values, start=1):
        yield Row(_pair(value) if pairs else value, f"{name} {number}")


def _pair(example: dict[str, Any]) -> dict[str, Any]:
    """Return an example with a wrong answer beside its last one."""
    if "completion" in example:
        right = example.pop("completion")
        return {**example, "chosen": right, "rejected": " ".join(["", *reversed(right.split())])}
    *prompt, right = example["messages"]
    words = right["content"].split()
    wrong = {**right, "content": " ".join(reversed(words))}
    return {"prompt": prompt, "chosen": [right], "rejected": [wrong]}


def _draw(generator: random.Random, *, num: int) -> Iterator[dict[str, Any]]:
    draw, words = generator.random, make_words()
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

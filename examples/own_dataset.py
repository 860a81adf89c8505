"""A custom dataset: sums such as "17+5=22", generated on access.

    python -m torchtitan.train --training.dataset examples.own_dataset:Sums \
        --training.dataset_options.digits 2 --training.seq_len 64 \
        --model.tokenizer_path byte --training.steps 20

A class with `__len__` and `__getitem__` is shuffled and repeated by the trainer, and resumed at the
next sample on any number of ranks. Labels are -100 on the question, so only the answer has a loss.
Validation reads a held-out tenth of all sums.
"""

from __future__ import annotations

import random

from torchtitan.data.tokenizer import Tokenizer


class Sums:
    """Samples full of sums of two numbers.

    Args:
        tokenizer, seq_len, seed, held_out: Passed by the trainer, by name.
        digits: Digits of each number, at most.
        num_samples: Samples of the training.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        held_out: bool,
        digits: int = 2,
        num_samples: int = 10000,
    ) -> None:
        self.tokenizer, self.seq_len, self.seed, self.held_out = tokenizer, seq_len, seed, held_out
        self.largest, self.num_samples = 10**digits, num_samples

    def __len__(self) -> int:
        return self.num_samples // (10 if self.held_out else 1)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        draw, largest = random.Random(f"{self.seed}/{self.held_out}/{i}"), self.largest
        ids: list[int] = []
        is_answer: list[bool] = []
        while len(ids) <= self.seq_len:
            a, b = draw.randrange(largest), draw.randrange(largest)
            if ((a * largest + b) % 10 == 0) != self.held_out:
                continue
            for text, counts in ((f"{a}+{b}=", False), (f"{a + b}\n", True)):
                new = self.tokenizer.encode(text)
                ids += new
                is_answer += [counts] * len(new)
        labels = [token if counts else -100 for token, counts in zip(ids, is_answer, strict=True)]
        return {"tokens": ids[: self.seq_len], "labels": labels[1 : self.seq_len + 1]}

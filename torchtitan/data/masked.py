"""Samples with a random number of masked labels, to compare layouts: `synthetic_masked`."""

from __future__ import annotations

import random

from torchtitan.data.dataset import IGNORED, Dataset
from torchtitan.data.loader import Samples


class MaskedDataset(Dataset):
    """Keeps the labels of a pseudo-random run in each sample and sets the rest to -100."""

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

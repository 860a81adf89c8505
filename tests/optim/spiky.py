"""Data that are soon learnt, but for the samples of two steps."""

from __future__ import annotations

import random

BATCH = 8
SPIKES = (10, 15)


class Spiky:
    """The bytes 1 to 9 over and over; random bytes in the steps that spike."""

    def __init__(self, *, seq_len: int, **_: object) -> None:
        self._length = seq_len + 1

    def __getitem__(self, k: int) -> list[int]:
        draw = random.Random(k).randrange
        if k // BATCH + 1 in SPIKES:
            return [draw(256) for _ in range(self._length)]
        return [(k + i) % 9 + 1 for i in range(self._length)]

"""Data that are soon learnt, but for the samples of two steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

BATCH = 8
SPIKES = (10, 15)


class Spiky:
    """The bytes 1 to 9 over and over; random bytes in the steps that spike."""

    def __init__(self, *, seq_len: int, **_: object) -> None:
        self._length, self._next = seq_len + 1, 0

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            k, self._next = self._next, self._next + 1
            draw = random.Random(k).randrange
            spikes = k // BATCH + 1 in SPIKES
            yield [draw(256) if spikes else (k + i) % 9 + 1 for i in range(self._length)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]

"""Samples that are left out of the global order, as `training.skip_samples` says.

Numbers stay what they are: sample 500 is the same sample with and without gaps. What is left, in
the same order, is counted by places: place 0 is the first number that is not left out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Gaps:
    """The numbers that are left out, as ranges (first, last), in order and apart."""

    def __init__(self, ranges: Sequence[Sequence[int]] = ()) -> None:
        self._firsts = [first for first, _ in ranges]
        self._ends = [last + 1 for _, last in ranges]
        sizes = [last + 1 - first for first, last in ranges]
        self._before = [0, *accumulate(sizes)]
        self._begins = [a - n for a, n in zip(self._firsts, self._before, strict=False)]

    def number(self, place: int) -> int:
        """Return the number of the sample at a place."""
        return place + self._before[bisect_right(self._begins, place)]

    def place(self, number: int) -> int:
        """Return how many samples before a number are left."""
        i = bisect_left(self._ends, number)
        inside = max(0, number - self._firsts[i]) if i < len(self._firsts) else 0
        return number - self._before[i] - inside

    def holds(self, number: int) -> bool:
        """Tell whether a number is left out."""
        i = bisect_right(self._ends, number)
        return i < len(self._firsts) and self._firsts[i] <= number

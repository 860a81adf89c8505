"""The order of samples, as pure functions of the position.

A shuffled list of all samples takes memory for each sample on each rank, and its state is hard to
store. Here nothing is stored: `Permutation` computes the i-th element of a shuffle. `Mixture`
computes which source the k-th sample comes from, and how many came from that source before. So the
position in the data is a single number, and all ranks, workers and resumed runs agree on the order.

The permutation is a Feistel network over pairs of digits, as in format-preserving encryption (Black
and Rogaway, "Ciphers with arbitrary finite domains", 2002): each round adds a keyed hash of one
digit to the other, which can be undone for any hash, so all rounds together are one-to-one.
The pairs number a little over n; a value of n or more is sent through again until it falls below n
(cycle walking), which again is one-to-one.

`SkippedSamples` excludes samples from the global order, as set by `training.skip_samples`. Numbers
stay the same: sample 500 is the same sample with and without skipped samples. The remaining samples
are counted by offsets: offset 0 is the first number that is not skipped.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from math import gcd, isqrt, lcm

ROUNDS = 8
MASK = 2**64 - 1


class Permutation:
    """A pseudo-random order of 0 ... n-1 in O(1) memory; `permutation[i]` takes microseconds."""

    def __init__(self, n: int, *, seed: int, epoch: int, source: int) -> None:
        assert n > 0
        self._n = n
        # at least 4 digits: with fewer there are too few orders, and shuffles are not uniform
        self._side = max(4, isqrt(n - 1) + 1)
        name = f"{seed}/{epoch}/{source}".encode()
        self._keys = struct.unpack(f"<{ROUNDS}Q", blake2b(name, digest_size=8 * ROUNDS).digest())

    def __getitem__(self, i: int) -> int:
        assert 0 <= i < self._n
        i = self._encipher(i)
        while i >= self._n:
            i = self._encipher(i)
        return i

    def _encipher(self, i: int) -> int:
        """Permute 0 ... side**2 - 1."""
        side = self._side
        left, right = divmod(i, side)
        for key in self._keys:
            left, right = right, (left + _hash(right + key)) % side
        return left * side + right


class Inverse(Permutation):
    """The order backwards: `Inverse(...)[p[i]] == i` for a `p` with the same arguments."""

    def _encipher(self, i: int) -> int:
        """Undo the rounds, the last one first; cycle walking goes backwards with them."""
        side = self._side
        left, right = divmod(i, side)
        for key in reversed(self._keys):
            left, right = (right - _hash(left + key)) % side, left
        return left * side + right


def _hash(h: int) -> int:
    """Mix the bits as MurmurHash3 (fmix64): each bit of the input moves all of the output."""
    h &= MASK
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return h ^ (h >> 33)


@dataclass(frozen=True)
class Draw:
    """A sample of a mixture: number `index` of `source`, counted from 0 over all epochs."""

    source: int
    index: int


class Mixture:
    """Spread samples over sources in proportion to weights, exactly and evenly.

    The first source takes sample k if floor(k * share) grows from k to k + 1. The samples that it
    leaves are renumbered and divided among the other sources in the same way. Of k samples a source
    gets k times its share, to within 2 for up to four sources, and a few more for many.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights
        assert all(weight > 0 for weight in weights)
        # as written in decimals: 0.7 and 0.3 make 7 and 3
        exact = [Fraction(repr(weight)) for weight in weights]
        unit = lcm(*(fraction.denominator for fraction in exact))
        whole = [int(fraction * unit) for fraction in exact]
        # in lowest terms: equal for weights in the same proportion
        self.weights = [weight // gcd(*whole) for weight in whole]
        self._left = list(accumulate(reversed(self.weights)))[::-1]

    def __getitem__(self, k: int) -> Draw:
        for source, (weight, left) in enumerate(zip(self.weights, self._left, strict=True)):
            index = k * weight // left
            if (k + 1) * weight // left > index:
                return Draw(source, index)
            k -= index
        raise AssertionError("the last source takes every sample that is left")

    def number_of(self, draw: Draw) -> int:
        """Return which sample of the mixture a draw is: `mixture[mixture.number_of(d)] == d`."""
        return self.exhausted_after(draw.source, num_samples=draw.index + 1) - 1

    def count(self, source: int, *, first: int) -> int:
        """Return how many of the first `first` samples come from `source`."""
        for weight, left in zip(self.weights[:source], self._left, strict=False):
            first -= first * weight // left
        return first * self.weights[source] // self._left[source]

    def exhausted_after(self, source: int, *, num_samples: int) -> int:
        """Return after how many samples of the mixture `num_samples` came from `source`."""
        # earlier sources round down, so this one never falls behind floor(first * share)
        most = num_samples * self._left[0] // self.weights[source] + 1
        if most > sys.maxsize:
            return most  # no run is that long
        return bisect_left(
            range(most), num_samples, key=lambda first: self.count(source, first=first)
        )


class SkippedSamples:
    """Numbers that are passed over, as ranges (first, last), in order and disjoint."""

    def __init__(self, ranges: Sequence[Sequence[int]] = ()) -> None:
        self._firsts = [first for first, _ in ranges]
        self._ends = [last + 1 for _, last in ranges]
        sizes = [last + 1 - first for first, last in ranges]
        self._before = [0, *accumulate(sizes)]
        self._begins = [a - n for a, n in zip(self._firsts, self._before, strict=False)]

    def number_at(self, offset: int) -> int:
        """Return the number of the sample that follows `offset` samples that are not skipped."""
        return offset + self._before[bisect_right(self._begins, offset)]

    def offset_of(self, number: int) -> int:
        """Return how many samples before a number are not skipped."""
        i = bisect_left(self._ends, number)
        inside = max(0, number - self._firsts[i]) if i < len(self._firsts) else 0
        return number - self._before[i] - inside

    def holds(self, number: int) -> bool:
        """Return whether a number is skipped."""
        i = bisect_right(self._ends, number)
        return i < len(self._firsts) and self._firsts[i] <= number
